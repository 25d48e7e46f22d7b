"""A trace in a few lines of text: where the time of each role goes, and when the phases of the launch begin and end."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

from .record import Trace

ROLES = ("load A", "load B", "dispatch", "math")


def summary(trace: Trace) -> str:
    """Lines for a terminal. Shares are means over the warps of a role, of the span of the launch."""
    return "\n".join([_headline(trace), *_milestones(trace), *_tiles(trace), *_shares(trace)])


def _us(ns: float) -> str:
    return f"{ns / 1e3:.1f}"


def _headline(trace: Trace) -> str:
    text = (
        f"rank {trace.rank}: {_us(trace.span)} us on {trace.num_ctas} SMs at {trace.clock_ghz:.3f} GHz, "
        f"block_m {trace.block_m}, lag {trace.lag_blocks}, unit {trace.unit_blocks}"
    )
    return text + (f"; {trace.dropped} SPANS DROPPED: raise trace_events" if trace.dropped else "")


def _milestones(trace: Trace) -> Iterator[str]:
    """When the phases begin and end, over all SMs; and how far the SMs are apart at the end."""
    counts = [span.end for _, span in trace.spans("load B", "WaitCounts")]
    yield from _line("counts known", counts)
    yield from _line("first pulled row", _firsts(trace, "dispatch", "Pull", 0))
    yield from _line("pull ends", _lasts(trace, "dispatch", "Pull", 0))
    for phase in (1, 2):
        begins = [span.begin for _, span in trace.spans("math", "Multiply", phase)]
        ends = [span.end for _, span in trace.spans("math", "Epilogue", phase)]
        if begins and ends:
            yield f"  L{phase} tiles          first begins {_us(min(begins))}, last ends {_us(max(ends))} us"
    last_tiles = _lasts(trace, "math", "Epilogue", 0)
    yield from _line("last tile ends", last_tiles)
    yield from _line("SM finished", _lasts(trace, "math", "", 0))
    if last_tiles:
        idle = max(last_tiles) - statistics.mean(last_tiles)
        yield f"  idle between an SM's last tile and the last of all: mean {_us(idle)} us ({idle / trace.span:.1%})"


def _line(title: str, times: list[int]) -> Iterable[str]:
    return [f"  {title:18}{_spread(times)}"] if times else []


def _spread(times: list[int]) -> str:
    return f"min {_us(min(times))}, median {_us(statistics.median(times))}, max {_us(max(times))} us"


def _firsts(trace: Trace, role: str, kind: str, phase: int) -> list[int]:
    """Per SM: when the first such span begins."""
    found: dict[int, int] = {}
    for warp, span in trace.spans(role, kind, phase):
        found[warp.cta] = min(found.get(warp.cta, span.begin), span.begin)
    return list(found.values())


def _lasts(trace: Trace, role: str, kind: str, phase: int) -> list[int]:
    """Per SM: when the last such span ends."""
    found: dict[int, int] = {}
    for warp, span in trace.spans(role, kind, phase):
        found[warp.cta] = max(found.get(warp.cta, 0), span.end)
    return list(found.values())


def _tiles(trace: Trace) -> Iterator[str]:
    """What a tile costs a math warpgroup; clocks at the mean rate of the launch."""
    for phase, k_blocks in enumerate(trace.k_blocks, 1):
        multiply = [span for _, span in trace.spans("math", "Multiply", phase)]
        if not multiply:
            continue
        busy = statistics.median(span.duration - span.stalled for span in multiply) * trace.clock_ghz / k_blocks
        parts = {
            "task": [span.duration for _, span in trace.spans("math", "WaitTask", phase)],
            "first stage": [span.duration for _, span in trace.spans("math", "WaitFirstStage", phase)],
            "multiply": [span.duration for span in multiply],
            "of it stalled": [span.stalled for span in multiply],
            "epilogue": [span.duration for _, span in trace.spans("math", "Epilogue", phase)],
        }
        text = ", ".join(f"{name} {_us(statistics.mean(times))}" for name, times in parts.items() if times)
        yield f"  L{phase} tile (mean us) {text}; busy {busy:.0f} clocks per K block (median)"


def _shares(trace: Trace) -> Iterator[str]:
    for role in ROLES:
        warps = sum(warp.role.startswith(role) for warp in trace.warps)
        spent: dict[str, int] = defaultdict(int)
        stalled: dict[str, int] = defaultdict(int)
        for _, span in trace.spans(role):
            spent[span.name] += span.duration
            stalled[span.name] += span.stalled
        whole = warps * trace.span
        if not spent or not whole:
            continue
        yield f"  {role} ({warps} warps)"
        for name in sorted(spent, key=spent.get, reverse=True):
            text = f"    {spent[name] / whole:6.1%}  {name}"
            if "Wait" not in name and stalled[name] >= 0.001 * whole:
                text += f", stalled {stalled[name] / whole:.1%}"
            yield text
        yield f"    {max(0.0, 1 - sum(spent.values()) / whole):6.1%}  ended"
