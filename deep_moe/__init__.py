"""The fused expert-parallel MoE layer in one kernel launch, on GPUs and on a CPU emulator.

Use:
    problem = deep_moe.Problem(num_experts=256, num_topk=6, hidden=4096, intermediate=2048, max_tokens_per_rank=8192)
    buffer = deep_moe.SymmBuffer(group, problem)
    l1, l2 = deep_moe.transform_weights(problem, gate_up, down)
    deep_moe.stage(buffer, x, topk_idx, topk_weights)
    deep_moe.fp8_mega_moe(y, l1, l2, buffer)
"""

from . import emulator as emulator
from .buffer import LocalGroup as LocalGroup
from .buffer import SymmBuffer as SymmBuffer
from .config import Problem as Problem
from .errors import Deadlock as Deadlock
from .errors import DeepMoeError as DeepMoeError
from .errors import DeviceError as DeviceError
from .errors import EmulatorFault as EmulatorFault
from .errors import JitError as JitError
from .errors import MismatchError as MismatchError
from .errors import OutOfBounds as OutOfBounds
from .errors import PeerTimeout as PeerTimeout
from .errors import Protocol as Protocol
from .ops import TransformedWeights as TransformedWeights
from .ops import fp8_mega_moe as fp8_mega_moe
from .ops import stage as stage
from .ops import transform_weights as transform_weights
from .version import __version__ as __version__
