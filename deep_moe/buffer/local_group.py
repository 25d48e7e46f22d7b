"""LocalGroup: all ranks of a group as threads of this process, on the emulator or on GPUs."""

import contextlib
import contextvars
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .. import _C
from ..errors import DeviceError, PeerTimeout

T = TypeVar("T")

# Kernels of this many streams run at the same time by default; more need CUDA_DEVICE_MAX_CONNECTIONS.
_DEFAULT_CONNECTIONS = 8
_MAX_CONNECTIONS = 32

_group_ids = itertools.count(1)


# The rank whose thread this is, inside LocalGroup.run.
current_rank: contextvars.ContextVar["LocalRank | None"] = contextvars.ContextVar("current_rank", default=None)


class LocalGroup:
    """A group of `num_ranks` ranks in one process.

    Args:
        num_ranks: 1 to 72.
        device: "cpu" (the emulator), "cuda" (the current GPU), or a list of CUDA devices that the ranks are dealt to
            round-robin. Ranks that share a GPU share its SMs in equal parts.

    Raises:
        ValueError: an argument is wrong.
        DeviceError: a GPU is not there, GPUs cannot reach each other's memory, or too many ranks share a GPU.
    """

    def __init__(self, num_ranks: int, device: Any) -> None:
        if not isinstance(num_ranks, int) or not 1 <= num_ranks <= _C.kMaxRanks:
            raise ValueError(f"num_ranks is {num_ranks!r}; it must be an integer from 1 to {_C.kMaxRanks}")
        devices = _checked_devices(device)
        self.devices = [devices[rank % len(devices)] for rank in range(num_ranks)]
        self.id = next(_group_ids)  # tells the launch order which launches must run together
        self.world = None
        self._meeting = _Meeting(num_ranks, self._unblock_all)
        self._running = threading.Lock()
        if devices[0].type == "cpu":
            self.world = _C.emu.World(num_ranks)
        else:
            _prepare_gpus(devices, self.devices)
        self.ranks = [LocalRank(self, rank) for rank in range(num_ranks)]

    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def _unblock_all(self) -> None:
        """A host barrier has been passed: the emulator may expect launches of every rank again."""
        if self.world is not None:
            for rank in range(self.size()):
                self.world.rank_blocked(rank, False)

    def run(self, fn: "Callable[[LocalRank], T]") -> list[T]:
        """Calls `fn(rank_group)` in one thread per rank and returns the results in rank order.

        In each thread the rank's device is current and, on a GPU, the rank's own stream; it starts after the work that
        the caller's current stream holds, and the caller's stream goes on after it. The first error (in time) is raised
        after all ranks have ended.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError("LocalGroup.run is running already; its ranks are one group and do one thing at a time")
        try:
            return self._run(fn)
        finally:
            self._running.release()

    def _run(self, fn: "Callable[[LocalRank], T]") -> list[T]:
        self._meeting.reset()
        results: list[Any] = [None] * self.size()
        errors: list[BaseException] = []
        callers = [rank.caller_stream() for rank in self.ranks]
        for rank in self.ranks:
            rank.started()

        def body(rank: LocalRank) -> None:
            current_rank.set(rank)
            try:
                with rank.current(callers[rank.rank()]):
                    results[rank.rank()] = fn(rank)
                rank.ended("has returned")
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)
                rank.ended(f"raised {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(body, rank), name=f"rank {rank.rank()}")
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class LocalRank:
    """One rank of a LocalGroup: what `LocalGroup.run` passes to its function, and what `SymmBuffer` takes."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group = group
        self.device = group.devices[rank]
        self._rank = rank
        self.stream = None
        self.num_sms = None
        if self.device.type == "cuda":
            index = self.device.index
            sms = _C.driver.device_attribute(index, _C.driver.DeviceAttribute.MultiprocessorCount)
            self.num_sms = sms // group.devices.count(self.device)
            self.stream = _rank_stream(index, group.devices[:rank].count(self.device))

    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return len(self.group.devices)

    def barrier(self) -> None:
        """Returns once all ranks have called it. PeerTimeout when one has ended instead."""
        self.all_gather(None)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. PeerTimeout when a rank has ended instead of calling it."""
        world = self.group.world
        if world is not None:
            world.rank_blocked(self._rank, True)
        try:
            return self.group._meeting.all_gather(self._rank, value)
        finally:
            if world is not None:
                world.rank_blocked(self._rank, False)

    def caller_stream(self) -> "torch.cuda.Stream | None":
        """The calling thread's current stream on this rank's device."""
        return None if self.stream is None else torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def current(self, caller: "torch.cuda.Stream | None"):
        """Makes this rank's device and stream current, ordered after and before the caller's work."""
        if self.stream is None or caller is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_stream(caller)
            try:
                yield
            finally:
                caller.wait_stream(self.stream)

    def started(self) -> None:
        """This rank's thread is about to act."""
        if self.group.world is not None:
            self.group.world.rank_started(self._rank)

    def ended(self, why: str) -> None:
        """This rank's thread will not launch or meet any more."""
        self.group._meeting.end(self._rank, why)
        if self.group.world is not None:
            self.group.world.rank_ended(self._rank, why)


class _Meeting:
    """An all-gather between threads that ends with an error, and not never, when a rank does not come."""

    def __init__(self, size: int, when_met: "Callable[[], None]") -> None:
        self.size = size
        self.when_met = when_met  # called by the last rank to come, before any rank goes on
        self.condition = threading.Condition()
        self.generation = 0
        self.reset()
        self.ended = dict.fromkeys(range(size), "is not running: LocalGroup.run starts the ranks")

    def reset(self) -> None:
        """Before a run: nobody waits, nobody has ended."""
        with self.condition:
            self.values: dict[int, Any] = {}
            self.result: list[Any] = []
            self.ended: dict[int, str] = {}

    def end(self, rank: int, why: str) -> None:
        with self.condition:
            self.ended[rank] = why
            self.condition.notify_all()

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        with self.condition:
            self.values[rank] = value
            if len(self.values) == self.size:
                self.result = [self.values[r] for r in range(self.size)]
                self.values = {}
                self.generation += 1
                self.when_met()
                self.condition.notify_all()
                return list(self.result)
            generation = self.generation
            while generation == self.generation:
                for peer, why in self.ended.items():
                    if peer not in self.values:
                        raise PeerTimeout(f"rank {rank} waited for all ranks to meet, but rank {peer} {why}")
                self.condition.wait()
            return list(self.result)


@functools.cache
def _rank_stream(device: int, slot: int) -> torch.cuda.Stream:
    """The stream of the slot-th rank on a GPU, for the life of the process.

    Not from torch's pool, whose streams are handed out again and again; and shared by all groups, because every stream
    takes one of the few connections that let kernels run at the same time.
    """
    return torch.cuda.ExternalStream(_C.driver.create_stream(device), device=f"cuda:{device}")


def _checked_devices(device: Any) -> list[torch.device]:
    items = device if isinstance(device, Sequence) and not isinstance(device, str) else [device]
    allowed = '"cpu", "cuda" or a list of CUDA devices'
    if not items:
        raise ValueError(f"device is {device!r}; it must be {allowed}")
    try:
        devices = [torch.device("cuda", item) if isinstance(item, int) else torch.device(item) for item in items]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; it must be {allowed}") from error
    if devices == [torch.device("cpu")]:
        return devices
    if any(d.type != "cuda" for d in devices):
        raise ValueError(f"device is {device!r}; it must be {allowed}")
    if _C.driver.missing():
        raise DeviceError(f"device is {device!r}, but there is {_C.driver.missing()}")
    return [torch.device("cuda", d.index if d.index is not None else torch.cuda.current_device()) for d in devices]


def _prepare_gpus(devices: list[torch.device], of_rank: list[torch.device]) -> None:
    """Checks that the GPUs are there and reach each other, and that the ranks of each can run at the same time."""
    count = _C.driver.device_count()
    for device in devices:
        if device.index >= count:
            raise DeviceError(f"device {device} does not exist; this process sees {count} GPUs")
    most = max(of_rank.count(device) for device in devices)
    if most >= _DEFAULT_CONNECTIONS:
        _ensure_connections(most, devices)
    for device, peer in itertools.permutations(sorted({d.index for d in devices}), 2):
        enable_peer_access(device, peer)


def _ensure_connections(ranks: int, devices: list[torch.device]) -> None:
    if ranks > _MAX_CONNECTIONS - 2:
        raise DeviceError(f"{ranks} ranks share a GPU, but it runs at most {_MAX_CONNECTIONS - 2} at the same time")
    if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or _DEFAULT_CONNECTIONS) > ranks:
        return
    if any(_C.driver.context_exists(device.index) for device in devices):
        raise DeviceError(
            f"{ranks} ranks share a GPU, and their kernels must run at the same time, which needs the environment "
            f"variable CUDA_DEVICE_MAX_CONNECTIONS={_MAX_CONNECTIONS} before the first CUDA call of the process; CUDA "
            "is already in use here: set it before starting Python, or make the LocalGroup first"
        )
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_MAX_CONNECTIONS)


def enable_peer_access(device: int, peer: int) -> None:
    """Lets kernels on `device` use memory of `peer`; DeviceError with the names of both when they cannot."""
    if not _C.driver.can_access_peer(device, peer):
        raise DeviceError(
            f"GPU {device} ({_C.driver.device_name(device)}) cannot access the memory of GPU {peer} "
            f"({_C.driver.device_name(peer)}); use GPUs that NVLink or PCIe peer-to-peer connects"
        )
    # torch keeps its own record of peers, which covers memory that it maps in pieces (expandable segments).
    torch.empty(1, device=f"cuda:{peer}").copy_(torch.zeros(1, device=f"cuda:{device}"))
    _C.driver.enable_peer_access(device, peer)
