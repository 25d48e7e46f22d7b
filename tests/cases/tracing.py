"""Kernels that trace: the same result, and spans that say what happened."""

import gzip
import json
import pickle
from collections import Counter

import pytest

from deep_moe import _C, testing, trace

COUNTS = [5, 0, 16, 3]
KINDS = {
    "load A": {"WaitTask", "WaitRows", "Load"},
    "load B": {"WaitCounts", "WaitWeights", "Load"},
    "dispatch": {"Route", "WaitRouteCounts", "WaitCountFlags", "Receive", "WaitCounts", "Pull", "WaitRingSlot"},
    "math": {"WaitTask", "WaitFirstStage", "Multiply", "Epilogue", "Decode", "WaitDone", "Combine"},
}


def traced_call(world, inputs) -> list[trace.Trace]:
    """The traces of a layer whose result is right."""
    for rank in world.ranks:
        rank.buffer.clear_trace()
    world.call_and_check(inputs)
    return [rank.buffer.trace() for rank in world.ranks]


@pytest.fixture
def traced(worlds):
    return worlds("traced", num_sms=2)


def test_the_result_has_the_same_bits(worlds, traced):
    inputs = traced.inputs(COUNTS)
    plain = worlds("main-4").call_and_check(inputs)
    for rank, (one, other) in enumerate(zip(plain, traced.call(inputs), strict=True)):
        assert testing.same_bits(one.y, other.y), f"rank {rank}"


def test_every_tile_appears_once_per_role(traced):
    """The schedule's tiles, in every phase of the work of loaders and math warpgroups; and every row is pulled."""
    inputs = traced.inputs(COUNTS)
    config = traced.problem.configs(traced.num_ranks)[-1]
    rows_of_ranks = traced.expected_stats(inputs)
    for one, rows in zip(traced_call(traced, inputs), rows_of_ranks.tolist(), strict=True):
        assert one.dropped == 0
        wanted = Counter(task[:4] for task in _C.task_order(config, rows))
        for role, kinds in {
            "load A": ["WaitTask", "WaitRows", "Load"],
            "load B": ["Load"],
            "math 0": ["WaitTask", "WaitFirstStage", "Multiply", "Epilogue"],
            "math 1": ["WaitTask", "WaitFirstStage", "Multiply", "Epilogue"],
        }.items():
            for kind in kinds:
                spans = [span for _, span in one.spans(role, kind) if span.phase]
                seen = Counter((span.phase, span.expert, span.block, span.n_tile) for span in spans)
                assert seen == wanted, f"rank {one.rank}, {role}, {kind}"
        assert sum(1 for _ in one.spans("dispatch", "Pull")) == sum(rows)


def test_a_lone_rank_tells_the_experts_of_its_blocks(worlds):
    """Whether it pulls its rows (9 tokens), does not (4), or asks memory for the counts (70)."""
    world = worlds("traced-1", num_sms=2)
    for count, bound in ((70, None), (4, 4), (9, None), (3, 4)):
        inputs = world.inputs([count], seed=count)
        config = world.problem.configs(1)[0 if bound else -1]
        (rows,) = world.expected_stats(inputs).tolist()
        world.ranks[0].buffer.clear_trace()
        world.call_and_check(inputs, bound=bound)
        one = world.ranks[0].buffer.trace()
        seen = Counter((span.phase, span.expert, span.block, span.n_tile) for _, span in one.spans("load B", "Load"))
        assert seen == Counter(task[:4] for task in _C.task_order(config, rows)), count
        assert sum(1 for _ in one.spans("dispatch", "Pull")) == (0 if bound else sum(rows))
        assert trace.summary(one)


def test_spans_follow_each_other(traced):
    for one in traced_call(traced, traced.inputs(COUNTS)):
        assert {warp.cta for warp in one.warps} == {0, 1} and len(one.warps) == 2 * len(one.roles)
        for warp in one.warps:
            role = warp.role.rstrip(" 0123456789")
            assert warp.spans and {span.kind for span in warp.spans} <= KINDS[role], warp.role
            times = [0] + [time for span in warp.spans for time in (span.begin, span.end)]
            assert times == sorted(times) and times[-1] == warp.end <= one.span
            assert times[2:-1:2] == times[3::2], "each begins where the one before it ended"
            assert all(0 <= span.stalled <= span.duration for span in warp.spans)
        # A tile is multiplied after its rows are there, and its L2 after all of its block's L1.
        arrived = {(s.phase, s.block, s.n_tile): s.end for _, s in one.spans("load A", "WaitRows")}
        stored = Counter()
        for _, span in one.spans("math", "Epilogue", phase=1):
            stored[span.block] = max(stored[span.block], span.end)
        slack = 200 if traced.device != "cpu" else 0  # ns: SMs see a step of the timer at different moments
        for _, span in one.spans("math", "WaitFirstStage"):
            assert span.end + slack >= arrived[span.phase, span.block, span.n_tile]
            if span.phase == 2:
                assert span.end + slack >= stored[span.block]


def test_what_does_not_fit_is_counted(traced):
    """More rows than spans that a dispatch warp can record: nothing else is disturbed."""
    room = traced.problem.configs(traced.num_ranks)[-1].trace_events
    inputs = traced.inputs([64] * 4, traced.routing.to_rank(1))
    small, large, *_ = traced_call(traced, inputs)
    assert small.dropped == 0
    dropped = {warp.role: warp.dropped for warp in large.warps if warp.cta == 0}
    assert dropped["dispatch 0"] > 0 and dropped["dispatch 1"] > 0 and "SPANS DROPPED" in trace.summary(large)
    assert len(large.warps) == 2 * len(large.roles)
    for warp in large.warps:
        assert len(warp.spans) == room if warp.dropped else 0 < len(warp.spans) <= room
    assert sum(w.dropped + len(w.spans) for w in large.warps if w.role.startswith("dispatch")) >= 64 * 4 * 4


def test_a_file_for_perfetto(traced, tmp_path):
    traces = pickle.loads(pickle.dumps(traced_call(traced, traced.inputs(COUNTS))))  # as ranks send them
    for name in ("trace.json", "trace.json.gz"):
        trace.write_chrome_trace(tmp_path / name, traces)
    text = (tmp_path / "trace.json").read_bytes()
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == text
    events = json.loads(text)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(warp.spans) for one in traces for warp in one.warps)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["name"] for event in spans)
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    threads = {(event["pid"], event["tid"]) for event in spans}
    assert {name for name, *_ in names} == {"process_name", "thread_name"}
    assert len(threads) == 4 * 2 * len(traces[0].roles)
    assert [names["process_name", rank, 0] for rank in range(4)] == [f"rank {rank}" for rank in range(4)]
    assert len({names[("thread_name", *thread)] for thread in threads}) == 2 * len(traces[0].roles)
    tile = next(event for event in spans if event["name"] == "L2 Multiply")
    assert tile["cat"] == "math" and {"block", "tile", "expert"} <= tile["args"].keys()


def test_the_summary_adds_up(traced):
    one = traced_call(traced, traced.inputs(COUNTS))[2]
    text = trace.summary(one)
    assert "pull ends" in text and "L1 tiles" in text and "L2 tile (mean us)" in text and "DROPPED" not in text
    for role in ("load A", "load B", "dispatch", "math"):
        part = text.split(f"  {role} (")[1].split("warps)\n")[1]
        shares = []
        for line in part.splitlines():
            if not line.startswith("    "):
                break
            shares.append(float(line.split("%")[0]))
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares)), role


def test_nothing_was_traced(worlds, traced):
    with pytest.raises(ValueError, match='does not trace; give its Problem overrides={"trace_events": 4096}'):
        worlds("main-4").ranks[0].buffer.trace()
    traced.call(traced.inputs(COUNTS))
    traced.ranks[0].buffer.clear_trace()
    with pytest.raises(ValueError, match="trace is empty"):
        traced.ranks[0].buffer.trace()
    assert traced.ranks[1].buffer.trace().rank == 1
