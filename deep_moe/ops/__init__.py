"""The public operations."""

from .mega_moe import OPS as OPS
from .mega_moe import fp8_mega_moe as fp8_mega_moe
from .mega_moe import fp8_mxfp4_mega_moe as fp8_mxfp4_mega_moe
from .stage import stage as stage
from .weights import TransformedWeights as TransformedWeights
from .weights import transform_weights as transform_weights
