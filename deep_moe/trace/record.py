"""A launch as it was recorded, in nanoseconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .. import _C


@dataclass(frozen=True, slots=True)
class Span:
    """What a warp did between two moments, in ns since the start of the launch."""

    kind: str  # of _C.TraceKind
    begin: int
    end: int
    stalled: int  # ns of it spent waiting, where the kind says for what (include/deep_moe/layout/trace.h)
    phase: int = 0  # 1 or 2: of the tile; 0: no tile
    block: int | None = None  # row block: of the tile, or that a row was pulled into or waits for
    n_tile: int | None = None
    expert: int | None = None  # local, of the row block

    @property
    def duration(self) -> int:
        return self.end - self.begin

    @property
    def name(self) -> str:
        """The kind, with the phase where there is one."""
        return f"L{self.phase} {self.kind}" if self.phase else self.kind


@dataclass(frozen=True, slots=True)
class Warp:
    """The spans of one warp, in order, without gaps or overlaps."""

    cta: int
    role: str  # of Trace.roles
    spans: list[Span]
    dropped: int  # spans for which there was no room

    @property
    def end(self) -> int:
        """When its last span ended; 0 without spans."""
        return self.spans[-1].end if self.spans else 0


@dataclass(frozen=True)
class Trace:
    """One rank's launch."""

    rank: int
    block_m: int  # of the variant that was launched
    lag_blocks: int
    unit_blocks: int
    k_blocks: tuple[int, int]  # of an L1 and an L2 tile
    roles: tuple[str, ...]  # of a CTA's traced warps
    start_ns: int  # on the GPU's timer
    clock_ghz: float  # mean over the launch and its SMs
    warps: list[Warp]

    @property
    def span(self) -> int:
        """ns from the first warp's start to the end of the last span."""
        return max((warp.end for warp in self.warps), default=0)

    @property
    def num_ctas(self) -> int:
        return len({warp.cta for warp in self.warps})

    @property
    def dropped(self) -> int:
        return sum(warp.dropped for warp in self.warps)

    def spans(self, role: str = "", kind: str = "", phase: int = 0) -> Iterator[tuple[Warp, Span]]:
        """The spans of roles that begin with `role`, of one kind and phase; all where these are not given."""
        for warp in self.warps:
            if warp.role.startswith(role):
                for span in warp.spans:
                    if kind in ("", span.kind) and phase in (0, span.phase):
                        yield warp, span


def trace_of(rank: int, configs: "Sequence[_C.Config]", array: Tensor, expert_rows: Sequence[int]) -> Trace:
    """The launch that left `array` (uint8, a copy of the trace array in host memory) behind.

    Args:
        configs: of the buffer's variants.
        expert_rows: rows that each local expert received in that launch.

    Raises:
        ValueError: nothing was launched since the array was cleared, or it took too long for the SMs' clocks.
    """
    raw = _C.trace_warps(configs[0], array.data_ptr(), array.numel())
    if not raw:
        raise ValueError("the trace is empty: launch with this buffer first, and wait for the end of the launch")
    if max(warp.end_ns - warp.begin_ns for warp in raw) > 1 << 31:
        raise ValueError("the launch took more than two seconds, in which the clocks of the trace wrap around")
    config = configs[raw[0].bound_class]
    clock_ghz = sum(warp.clocks for warp in raw) / sum(warp.end_ns - warp.begin_ns for warp in raw)
    start = min(warp.begin_ns for warp in raw)
    experts = _experts_of_blocks(expert_rows, config.block_m)
    names = tuple(_C.trace_warp_names(config))
    warps = [
        Warp(
            warp.cta,
            names[warp.warp],
            [_span(values, warp.begin_ns - start, clock_ghz, experts) for values in warp.spans],
            warp.dropped,
        )
        for warp in raw
    ]
    return Trace(
        rank,
        block_m=config.block_m,
        lag_blocks=config.lag_blocks,
        unit_blocks=config.unit_blocks,
        k_blocks=(config.l1_k_blocks, config.l2_k_blocks),
        roles=names,
        start_ns=start,
        clock_ghz=clock_ghz,
        warps=warps,
    )


def _span(values: tuple, start: int, clock_ghz: float, experts: list[int]) -> Span:
    kind, phase, argument, n_tile, begin, end, stalled_clocks = values
    stalled = min(round(stalled_clocks / clock_ghz), end - begin)  # at most, if the clock was faster than its mean
    expert = experts[argument] if phase and argument < len(experts) else None
    return Span(kind.name, start + begin, start + end, stalled, phase, argument, n_tile, expert)


def _experts_of_blocks(expert_rows: Sequence[int], block_m: int) -> list[int]:
    """The local expert of each row block."""
    return [expert for expert, rows in enumerate(expert_rows) for _ in range(-(-rows // block_m))]
