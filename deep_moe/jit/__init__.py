"""JIT: renders, compiles and caches kernels. Knows nothing of torch, devices or streams.

    kernel = get_kernel(config, "mega", "sm_90a")
    kernel.read()          # the cubin
    report(kernel)         # registers, spills, warnings

Environment: DEEP_MOE_CACHE_DIR (/writable:/read-only:...), DEEP_MOE_JIT (allow, forbid), DEEP_MOE_JIT_COMPILER (nvrtc,
nvcc), DEEP_MOE_NVCC, CXX.
"""

from .build import Kernel as Kernel
from .build import get_kernel as get_kernel
from .build import get_kernels as get_kernels
from .build import report as report
from .render import KernelRequest as KernelRequest
