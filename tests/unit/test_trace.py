"""Reading a trace array: clocks of 32 bits, timers with steps of 1 us, warps that did not finish."""

import ctypes
import struct

import pytest
import torch

import deep_moe
from deep_moe import _C
from deep_moe.trace import TraceArray

EVENTS = 3
GHZ = 1.755
KINDS = _C.TraceKind
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
        self.array = TraceArray(configs, torch.device("cpu"), num_sms=2)
        memory = (ctypes.c_uint8 * self.array.num_bytes).from_address(self.array.address)
        self.slices = memoryview(memory).cast("B")
        self.slice_bytes = 32 + 16 * EVENTS
        assert self.array.num_bytes == 2 * len(_C.trace_warp_names()) * self.slice_bytes

    def warp(self, cta, warp, start_ns, start_clock, end_clock, events, recorded=None, bound_class=0):
        """events: [(begin, end, argument, kind, phase, stalled)] in clocks since the start of the CTA."""
        at = (cta * len(_C.trace_warp_names()) + warp) * self.slice_bytes
        end_ns = start_ns + end_clock / GHZ
        stale = int(start_ns // 1000 * 1000)  # the timer shows its last step; at the end its edge is awaited
        count = len(events) if recorded is None else recorded
        clocks = start_clock % 2**32, (start_clock + end_clock) % 2**32
        struct.pack_into("<QQIIII", self.slices, at, stale, round(end_ns), *clocks, count, bound_class)
        for i, (begin, end, argument, kind, phase, stalled) in enumerate(events):
            times = (start_clock + begin) % 2**32, (start_clock + end) % 2**32
            word = int(kind) | {1: 0, 2: 1, None: 2}[phase] << 6 | stalled // 16 << 8
            struct.pack_into("<IIII", self.slices, at + 32 + 16 * i, *times, argument, word)

    def read(self, rows=(100, 0, 300, 1)):
        return self.array.read(0, torch.tensor([rows], dtype=torch.int32))


@pytest.fixture
def recording(problem):
    return Recording(problem.configs(1))


def test_clocks_become_nanoseconds(recording):
    """CTAs whose SM clocks differ, one of them about to wrap around."""
    tile = 3 << 12 | 1
    for cta, clock in enumerate((12345, 2**32 - 1000)):
        for warp in range(6):
            events = [(0, 17550, NO_ARGUMENT, KINDS.WaitTask, None, 0), (17550, 175500, tile, KINDS.Multiply, 2, 1755)]
            recording.warp(cta, warp, 5_000_300 + 700 * cta, clock, 1_755_000, events)
    trace = recording.read()
    assert trace.num_ctas == 2 and trace.clock_ghz == pytest.approx(GHZ, rel=1e-5)
    for cta in (0, 1):
        warp = next(warp for warp in trace.warps if warp.cta == cta)
        first, second = warp.spans
        assert (first.begin, first.end) == (pytest.approx(700 * cta, abs=5), second.begin)
        assert (first.name, first.block, first.n_tile) == ("WaitTask", None, None)
        assert second.duration == pytest.approx(90_000, rel=1e-5)
        assert second.stalled == pytest.approx(1000, abs=16)
        assert (second.name, second.block, second.n_tile) == ("L2 Multiply", 3, 1)
    assert {warp.role for warp in trace.warps} == set(_C.trace_warp_names())


def test_experts_follow_from_the_rows(recording, problem):
    """100, 0, 300 and 1 rows are 1, 0, 3 and 1 blocks of 128 rows, or 2, 0, 5 and 1 of 64."""
    large, small = (
        next(i for i, config in enumerate(problem.configs(1)) if config.block_m == size) for size in (128, 64)
    )
    for variant, blocks, experts in ((large, (0, 1, 3, 4), [0, 2, 2, 3]), (small, (1, 2, 6, 7), [0, 2, 2, 3])):
        for i, block in enumerate(blocks):
            events = [(10, 20, block << 12, KINDS.Load, 1, 0)]
            recording.warp(0, i, 1000, 0, 1000, events, bound_class=variant)
        found = [span.expert for _, span in recording.read().spans()]
        assert found == experts


def test_unfinished_warps_are_left_out_and_dropped_spans_counted(recording):
    events = [(i, i + 1, 0, KINDS.Pull, None, 0) for i in range(EVENTS)]
    recording.warp(1, 2, 1000, 0, 1000, events, recorded=EVENTS + 4)
    (warp,) = recording.read().warps
    assert (warp.cta, warp.role, warp.dropped, len(warp.spans)) == (1, "dispatch 0", 4, EVENTS)


def test_what_cannot_be_read(recording):
    with pytest.raises(ValueError, match="trace is empty"):
        recording.read()
    recording.warp(0, 0, 1000, 0, 5_000_000_000, [])
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
