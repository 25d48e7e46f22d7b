"""Options of the CPU emulator, which runs the kernels of ranks whose tensors live on the CPU.

with deep_moe.emulator.options(seed=7):
    group.run(layer)
"""

from .options import Options as Options
from .options import current as current
from .options import options as options

__all__ = ["Options", "current", "options"]
