"""The fused expert-parallel MoE layer in one kernel launch, on GPUs and on a CPU emulator.

Use:
    problem = deep_moe.Problem(num_experts=256, num_topk=6, hidden=4096, intermediate=2048, max_tokens_per_rank=8192)
    buffer = deep_moe.SymmBuffer(group, problem)
    l1, l2 = deep_moe.transform_weights(problem, gate_up, down)
    deep_moe.stage(buffer, x, topk_idx, topk_weights)
    deep_moe.fp8_mega_moe(y, l1, l2, buffer)
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import Deadlock as Deadlock
from .errors import DeepMoeError as DeepMoeError
from .errors import DeviceError as DeviceError
from .errors import EmulatorFault as EmulatorFault
from .errors import JitError as JitError
from .errors import MismatchError as MismatchError
from .errors import OutOfBounds as OutOfBounds
from .errors import PeerTimeout as PeerTimeout
from .errors import Protocol as Protocol
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import emulator as emulator
    from .buffer import LocalGroup as LocalGroup
    from .buffer import SymmBuffer as SymmBuffer
    from .config import Problem as Problem
    from .ops import TransformedWeights as TransformedWeights
    from .ops import fp8_mega_moe as fp8_mega_moe
    from .ops import fp8_mxfp4_mega_moe as fp8_mxfp4_mega_moe
    from .ops import stage as stage
    from .ops import transform_weights as transform_weights

# What needs torch or the compiled extension is loaded at its first use: `python -m deep_moe env` has to work where one
# of them is missing, and `warmup` need not wait for torch.
_HOMES = {
    "LocalGroup": ".buffer",
    "SymmBuffer": ".buffer",
    "Problem": ".config",
    "TransformedWeights": ".ops",
    "fp8_mega_moe": ".ops",
    "fp8_mxfp4_mega_moe": ".ops",
    "stage": ".ops",
    "transform_weights": ".ops",
}


def __getattr__(name: str) -> Any:
    if name == "emulator":
        return importlib.import_module(".emulator", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "emulator"})
