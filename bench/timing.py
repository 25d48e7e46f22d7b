"""How a call is timed: cold L2, everything queued behind a sleeping kernel, CUDA events around one call."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SLEEP_CYCLES = {False: 400_000, True: 2_000_000}  # about 0.2 and 1 ms: the host must queue everything meanwhile
FLUSH_BYTES = 256 << 20  # four times the L2


class Ranks:
    """The processes of this bench: one, or those of torchrun."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(self.device)

    def connect(self) -> None:
        """Start the NCCL group; also with one rank, for peers that ask for one."""
        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29511")
            dist.init_process_group("nccl", rank=self.rank, world_size=self.size, device_id=self.device)

    @property
    def group(self):
        """What SymmBuffer takes."""
        return dist.group.WORLD if self.size > 1 else None

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over the ranks."""
        if self.size == 1:
            return values
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """The same of named values."""
        return dict(zip(values, self.max(list(values.values())), strict=True))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor; all of one shape."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def print(self, *text) -> None:
        if self.rank == 0:
            print(*text, flush=True)


class ColdTimer:
    """Times single calls. Between processes a tiny all-reduce behind the sleep lines the devices up: a barrier on the
    host would leak about 100 µs of host time into small cases."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=ranks.device)
        self._tiny = torch.zeros(1, device=ranks.device)

    def sample(self, call: Callable[[], None], prepare: Callable[[], None] | None = None) -> float:
        """µs of one call on this rank. `prepare` is queued before the clock starts."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if prepare:
            prepare()
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES[self.ranks.size > 1])
        if self.ranks.size > 1:
            dist.all_reduce(self._tiny)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3

    def medians(
        self, contenders: dict[str, tuple[Callable, Callable | None]], repeats: int, warmup: int = 2
    ) -> dict[str, float]:
        """Median µs of each (call, prepare), sampled in turns; the maximum over ranks."""
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(warmup + repeats):
            for name, (call, prepare) in contenders.items():
                samples[name].append(self.sample(call, prepare))
        medians = [sorted(times[warmup:])[repeats // 2] for times in samples.values()]
        return self.ranks.largest(dict(zip(samples, medians, strict=True)))


def host_us(call: Callable[[], None], calls: int = 50, rounds: int = 5) -> float:
    """Host time of one asynchronous call in µs: the best round's mean, with an empty queue before each round."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
