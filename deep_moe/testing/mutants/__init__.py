"""Small mutants of the device headers, for the mutation test: each plants a fault that the suite must notice."""

from .activation import ACTIVATION
from .exchange import EXCHANGE
from .mutant import Mutant
from .mxfp4 import MXFP4
from .pipeline import PIPELINE
from .tiles import TILES

MUTANTS = (*PIPELINE, *EXCHANGE, *TILES, *ACTIVATION, *MXFP4)

__all__ = ["MUTANTS", "Mutant"]
