"""Reading a trace array: halves of the timer, clocks whose rates differ, warps that did not finish."""

import ctypes
import struct

import pytest
import torch

import deep_moe
from deep_moe import _C
from deep_moe.trace import TraceArray

EVENTS = 3
NOW = 1_790_000_000_123_456_789  # ns: more bits than a float has
KINDS = _C.TraceKind
ROLES = ["load A", "load B", "dispatch 0", "dispatch 1", "math 0", "math 1"]
NO_ARGUMENT = 2**32 - 1


@pytest.fixture
def problem():
    return deep_moe.Problem(
        num_experts=4, num_topk=1, hidden=128, intermediate=128, max_tokens_per_rank=600,
        overrides={"trace_events": EVENTS},
    )  # fmt: skip


class Recording:
    """Writes what the warps of two CTAs would (include/deep_moe/layout/trace.h)."""

    def __init__(self, configs):
        self.warps = len(_C.trace_warp_names(configs[0]))
        self.array = TraceArray(configs, torch.device("cpu"), num_sms=2)
        memory = (ctypes.c_uint8 * self.array.num_bytes).from_address(self.array.address)
        self.slices = memoryview(memory).cast("B")
        self.slice_bytes = 32 + 16 * EVENTS
        assert self.array.num_bytes == 2 * self.warps * self.slice_bytes

    def warp(self, cta, warp, events, start_ns=NOW, ns=1000, start_clock=0, clocks=1000, recorded=None, bound_class=0):
        """events: [(begin, end, argument, kind, phase, stalled clocks)], times in ns since the start of the warp."""
        at = (cta * self.warps + warp) * self.slice_bytes
        count = len(events) if recorded is None else recorded
        pair = start_clock % 2**32, (start_clock + clocks) % 2**32
        struct.pack_into("<QQIIII", self.slices, at, start_ns, start_ns + ns, *pair, count, bound_class)
        for i, (begin, end, argument, kind, phase, stalled) in enumerate(events):
            times = (start_ns + begin) % 2**32, (start_ns + end) % 2**32
            word = int(kind) | {1: 0, 2: 1, None: 2}[phase] << 6 | stalled // 16 << 8
            struct.pack_into("<IIII", self.slices, at + 32 + 16 * i, *times, argument, word)

    def read(self, rows=(100, 0, 300, 1)):
        return self.array.read(0, torch.tensor([rows], dtype=torch.int32))


@pytest.fixture
def recording(problem):
    return Recording(problem.configs(1))


@pytest.mark.parametrize("start", [NOW, NOW // 2**32 * 2**32 - 5000], ids=["", "wraps"])
def test_times_since_the_first_warp(recording, start):
    """CTAs that start apart, whose SMs run at different rates: one clock wraps, and perhaps the timer's low half."""
    tile = 3 << 12 | 1
    events = [(0, 10_000, NO_ARGUMENT, KINDS.WaitTask, None, 0), (10_000, 100_032, tile, KINDS.Multiply, 2, 1760)]
    for cta, (clock, clocks) in enumerate(((12345, 1_980_000), (2**32 - 1000, 1_540_000))):
        for warp in range(6):
            recording.warp(cta, warp, events, start + 704 * cta, 1_000_000, clock, clocks)
    trace = recording.read()
    assert (trace.start_ns, trace.span, trace.num_ctas) == (start, 100_736, 2)
    assert trace.clock_ghz == pytest.approx(1.76)
    for cta in (0, 1):
        warp = next(warp for warp in trace.warps if warp.cta == cta)
        first, second = warp.spans
        assert (first.begin, first.end) == (704 * cta, 704 * cta + 10_000)
        assert (first.name, first.block, first.n_tile, first.stalled) == ("WaitTask", None, None, 0)
        assert (second.begin, second.duration, second.stalled) == (first.end, 90_032, 1000)
        assert (second.name, second.block, second.n_tile) == ("L2 Multiply", 3, 1)
    assert {warp.role for warp in trace.warps} == set(trace.roles) == {*ROLES}


def test_no_span_is_stalled_for_longer_than_it_lasts(recording):
    """Where the clock was faster than its mean."""
    recording.warp(0, 0, [(0, 320, 0, KINDS.Load, 1, 640)], ns=1000, clocks=1500)
    ((_, span),) = recording.read().spans()
    assert span.stalled == span.duration == 320


def test_experts_follow_from_the_rows(recording, problem):
    """100, 0, 300 and 1 rows are 1, 0, 3 and 1 blocks of 128 rows, or 2, 0, 5 and 1 of 64."""
    large, small = (
        next(i for i, config in enumerate(problem.configs(1)) if config.block_m == size) for size in (128, 64)
    )
    for variant, blocks, experts in ((large, (0, 1, 3, 4), [0, 2, 2, 3]), (small, (1, 2, 6, 7), [0, 2, 2, 3])):
        for i, block in enumerate(blocks):
            events = [(10, 20, block << 12, KINDS.Load, 1, 0)]
            recording.warp(0, i, events, bound_class=variant)
        found = [span.expert for _, span in recording.read().spans()]
        assert found == experts


def test_unfinished_warps_are_left_out_and_dropped_spans_counted(recording):
    events = [(i, i + 1, 0, KINDS.Pull, None, 0) for i in range(EVENTS)]
    recording.warp(1, 2, events, recorded=EVENTS + 4)
    (warp,) = recording.read().warps
    assert (warp.cta, warp.role, warp.dropped, len(warp.spans)) == (1, "dispatch 0", 4, EVENTS)


def test_what_cannot_be_read(recording):
    with pytest.raises(ValueError, match="trace is empty"):
        recording.read()
    recording.warp(0, 0, [], ns=2**31 + 1)
    with pytest.raises(ValueError, match="more than two seconds"):
        recording.read()
    recording.array.clear()
    with pytest.raises(ValueError, match="trace is empty"):
        recording.read()


def test_no_array_without_trace_events(problem):
    config = problem.configs(1)[0].replace(trace_events=0)
    assert _C.trace_bytes(config, 132) == 0 and TraceArray([config], torch.device("cpu"), 132).address == 0
    with pytest.raises(ValueError, match="does not trace"):
        TraceArray([config], torch.device("cpu"), 132).read(0, torch.zeros(1, 4))
