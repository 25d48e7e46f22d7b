"""Traces as a file for https://ui.perfetto.dev (or chrome://tracing): the Trace Event Format of Chromium."""

import gzip
import json
import os
from collections.abc import Sequence

from .record import Span, Trace


def write_chrome_trace(path: str | os.PathLike, traces: Sequence[Trace]) -> None:
    """Writes one process per rank, one thread per SM and warp role; times in us from the start of the first rank.

    Compressed when the path ends with .gz, which Perfetto reads too.
    """
    origin = min((trace.start_ns for trace in traces), default=0)
    with (gzip.open if str(path).endswith(".gz") else open)(path, "wt") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        separator = ""
        for trace in traces:
            for event in _events(trace, trace.start_ns - origin):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _events(trace: Trace, offset_ns: int):
    """The events of one rank as dictionaries."""
    roles = trace.roles
    yield _name("process_name", trace.rank, 0, f"rank {trace.rank}")
    for warp in trace.warps:
        thread = warp.cta * len(roles) + roles.index(warp.role) + 1
        yield _name("thread_name", trace.rank, thread, f"SM {warp.cta:3} {warp.role}")
        for span in warp.spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": warp.role.split()[0],
                "pid": trace.rank,
                "tid": thread,
                "ts": (offset_ns + span.begin) / 1e3,
                "dur": span.duration / 1e3,
                "args": _arguments(span),
            }


def _name(what: str, process: int, thread: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _arguments(span: Span) -> dict:
    arguments = {"block": span.block, "tile": span.n_tile, "expert": span.expert}
    if span.stalled:
        arguments["stalled_us"] = span.stalled / 1e3
    return {name: value for name, value in arguments.items() if value is not None}
