"""Traces: what each warp role of each SM did in a launch, waits included.

Kernels trace when the Problem overrides `trace_events` (spans that a warp can record); others have no trace code. After
a launch `SymmBuffer.trace()` gives a `Trace`: `summary` prints where its time went, `write_chrome_trace` writes it for
https://ui.perfetto.dev.
"""

from .array import TraceArray as TraceArray
from .chrome import write_chrome_trace as write_chrome_trace
from .record import Span as Span
from .record import Trace as Trace
from .record import Warp as Warp
from .report import summary as summary

EVENTS = 4096  # a `trace_events` for layers of up to 8192 tokens per rank: 52 MB on 132 SMs
