"""What runs a buffer's launches: a GPU, or the emulator, behind one small interface."""

import ctypes
import functools
import os
import threading
from typing import Any, Protocol

import torch

from .. import _C, jit
from .status import abort_error

DEFAULT_TIMEOUT_S = 60.0
# On the emulated clock, which jumps by 1000 s when a rank is missing: past a wait for another rank, but not past twice
# that time, when the barriers inside a block report a defect of the kernel.
EMULATOR_TIMEOUT_S = 600.0


class MegaPlan(Protocol):
    """A launch with everything but the per-call part filled in."""

    def run(self, stream: int, y: int, y_stride: int, y_rows: int, recv_stats: int) -> None:
        """Addresses; y_stride in bytes; recv_stats may be 0."""


class Backend(Protocol):
    """Launches for one rank."""

    host_status: int  # address that a kernel writes its abort record to, or 0
    reported: bool  # an abort record was raised
    timeout_ns: int  # of a wait for another rank

    def stream(self) -> int:
        """The current stream's handle."""

    def mega_plan(self, variant: int, arguments: "_C.MegaArguments") -> MegaPlan:
        """A plan for the variant-th bound class."""

    def stage(self, call: "_C.StageCall") -> None:
        """Launches `stage`."""

    def max_sms(self) -> int:
        """The most CTAs of a launch."""

    def check(self) -> None:
        """Raises what an earlier launch reported."""

    def synchronize(self) -> None:
        """Waits for everything that was launched."""


def timeout_ns() -> int:
    """How long a kernel on a GPU waits for another rank: DEEP_MOE_TIMEOUT in seconds, by default 60."""
    text = os.environ.get("DEEP_MOE_TIMEOUT") or DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"DEEP_MOE_TIMEOUT is {text!r}; it must be a number of seconds above 0")
    return int(seconds * 1e9)


def build_kernels(configs: "list[_C.Config]", arch: str) -> list[jit.Kernel]:
    """The mega kernel of each configuration, then the stage kernel; compiled in parallel where the cache has none."""
    return jit.get_kernels([(config, "mega", arch) for config in configs] + [(configs[0], "stage", arch)])


def _expected(configs: "list[_C.Config]") -> tuple[list[str], list[tuple[int, ...]]]:
    """Entry points, and what deep_moe_info must say, in the order of `build_kernels`."""
    infos = [tuple(_C.mega_kernel_info(config)) for config in configs]
    return ["mega_moe"] * len(configs) + ["stage"], [*infos, tuple(_C.stage_kernel_info(configs[0]))]


_loading = threading.Lock()


@functools.cache
def _gpu_kernel(device: int, kernel: jit.Kernel, name: str, info: tuple[int, ...]) -> "_C.driver.Kernel":
    return _C.driver.Kernel(device, kernel.read(), name, info)


@functools.cache
def _emulator_kernel(kernel: jit.Kernel, name: str, info: tuple[int, ...]) -> "_C.EmulatorKernel":
    return _C.EmulatorKernel(str(kernel.path), name, info)


class GpuBackend:
    """Launches on one GPU."""

    reported = False

    def __init__(
        self, device: torch.device, configs: "list[_C.Config]", num_sms: int, group_id: int, rank: int
    ) -> None:
        built = build_kernels(configs, "sm_90a")
        with _loading:
            kernels = [_gpu_kernel(device.index, *each) for each in zip(built, *_expected(configs), strict=True)]
        *self._kernels, self._stage_kernel = kernels
        self._device = device
        self.timeout_ns = timeout_ns()
        self._num_sms = num_sms
        self._lane = _C.LaunchLane(device.index, group_id, rank, num_sms)
        self._stage_plan = None
        self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self._status_tensor = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self.host_status = self._status_tensor.data_ptr()
        self._status = ctypes.c_uint64.from_address(self.host_status)

    def bind(self, buffer: int) -> None:
        """The own buffer's address is known."""
        self._stage_plan = _C.StagePlan(self._stage_kernel, buffer, self._num_sms)

    def mega_plan(self, variant: int, arguments: "_C.MegaArguments") -> MegaPlan:
        return _C.LaunchPlan(self._kernels[variant], self._lane, arguments, self._num_sms)

    def stage(self, call: "_C.StageCall") -> None:
        self._stage_plan.run(self.stream(), call)

    def max_sms(self) -> int:
        return self._num_sms

    def check(self) -> None:
        if self._status.value:
            self.reported = True
            raise abort_error(self._status.value)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class EmulatorBackend:
    """Launches on the emulator: a call returns when the rank's grid has ended."""

    host_status = 0
    reported = False
    timeout_ns = int(EMULATOR_TIMEOUT_S * 1e9)

    def __init__(self, world: "_C.emu.World", configs: "list[_C.Config]", num_sms: int | None, rank: int) -> None:
        built = build_kernels(configs, "emulator")
        with _loading:
            kernels = [_emulator_kernel(*each) for each in zip(built, *_expected(configs), strict=True)]
        *self._kernels, self._stage_kernel = kernels
        self._world = world
        self._configs = configs
        self._num_sms = num_sms
        self._rank = rank
        self._stage_plan = None
        self._abort = None
        self.counts = None  # of the last launch: _C.emu.Counts

    def bind(self, buffer: int) -> None:
        """The own buffer's address is known."""
        offset = next(offset for name, offset, _ in _C.header_fields() if name == "abort")
        self._abort = ctypes.c_uint64.from_address(buffer + offset)
        self._stage_plan = _C.EmulatorStagePlan(self._world, self._stage_kernel, self._configs[0], self._rank, buffer)

    def stream(self) -> int:
        return 0

    def mega_plan(self, variant: int, arguments: "_C.MegaArguments") -> MegaPlan:
        plan = _C.EmulatorLaunchPlan(self._world, self._kernels[variant], arguments)
        return _EmulatorMegaPlan(self, plan)

    def stage(self, call: "_C.StageCall") -> None:
        options, num_sms = self.options()
        self.counts = self._stage_plan.run(options, num_sms, call)

    def options(self) -> "tuple[_C.emu.Options, int]":
        """The options in force, and the number of SMs."""
        from .. import emulator

        current = emulator.current()
        return current.native(), self._num_sms or current.num_sms

    def max_sms(self) -> int:
        return self.options()[1]  # those in force now

    def check(self) -> None:
        if self._abort.value:
            self.reported = True
            raise abort_error(self._abort.value)

    def synchronize(self) -> None:
        pass


class _EmulatorMegaPlan:
    def __init__(self, backend: EmulatorBackend, plan: Any) -> None:
        self._backend = backend
        self._plan = plan

    def run(self, stream: int, y: int, y_stride: int, y_rows: int, recv_stats: int) -> None:
        options, num_sms = self._backend.options()
        self._backend.counts = self._plan.run(options, num_sms, y, y_stride, y_rows, recv_stats)
        self._backend.check()
