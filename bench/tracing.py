"""One more launch of each row by kernels that trace: a summary, and a file for https://ui.perfetto.dev."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timing import ColdTimer, Ranks

import deep_moe
from deep_moe import trace

WARM_UP = 2  # launches before the one that counts


class TracedLaunches:
    """A buffer of the same problem whose kernels trace."""

    def __init__(self, problem: deep_moe.Problem, op: Callable, ranks: Ranks, num_sms: int | None, path: str) -> None:
        overrides = dict(problem.overrides) | {"trace_events": trace.EVENTS}
        problem = dataclasses.replace(problem, overrides=overrides)
        self.op, self.ranks, self.path = op, ranks, Path(path)
        self.buffer = deep_moe.SymmBuffer(ranks.group, problem, num_sms=num_sms)

    def row(self, name: str, inputs, weights: tuple, bound: int, timer: ColdTimer) -> None:
        """Launches with a cold L2, as the timed calls; prints the summary of rank 0 and writes all ranks' spans."""
        y = torch.empty(inputs.x.shape, dtype=torch.bfloat16, device=self.ranks.device)
        deep_moe.stage(self.buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)
        for _ in range(1 + WARM_UP):
            us = timer.sample(lambda: self.op(y, *weights, self.buffer, num_tokens_bound=bound))
        traces = self._gathered(self.buffer.trace())
        stem, dot, suffixes = self.path.name.partition(".")
        path = self.path.with_name(f"{stem}-{name}{dot}{suffixes}")
        if self.ranks.rank == 0:
            trace.write_chrome_trace(path, traces)
        self.ranks.print(f"traced, {us:.1f} us, in {path}\n{trace.summary(traces[0])}")

    def _gathered(self, own: trace.Trace) -> list[trace.Trace]:
        """The traces of all ranks on rank 0, the own one elsewhere."""
        if self.ranks.size == 1:
            return [own]
        traces = [None] * self.ranks.size if self.ranks.rank == 0 else None
        dist.gather_object(own, traces)
        return traces or [own]

    def close(self) -> None:
        self.buffer.destroy()
