"""bench/ without a GPU: floors and ratios must not flatter, and a sweep must not compare wrong kernels."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deep_moe
from deep_moe import reference, testing

BENCH = Path(__file__).parents[2] / "bench"


def bench_module(name: str):
    """The scripts of bench/ import each other as neighbours."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def shapes():
    return bench_module("shapes")


@pytest.fixture(scope="module")
def mega():
    return bench_module("mega")


@pytest.fixture(scope="module")
def sweep():
    return bench_module("sweep")


@pytest.fixture
def h200(shapes):
    return shapes.Ceilings(read_gbs=4550, fp8_tflops=1390)


@pytest.mark.parametrize(
    "name, tokens, touched, us",
    [
        ("flash", 8192, 32, 1780),
        ("flash", 64, 32, 177),
        ("flash", 1, 6, 33.2),
        ("v3", 8192, 32, 4152),
        ("v3", 64, 32, 310),
    ]
    + [("pro", 8192, 48, 4670), ("flash", 0, 0, 0)],
)
def test_floors(shapes, h200, name, tokens, touched, us):
    """Weights over bandwidth or flops over peak, by hand."""
    assert shapes.floor_us(shapes.SHAPES[name], tokens, 1, touched, h200) == pytest.approx(us, rel=5e-3)


def test_the_wire_can_be_the_floor(shapes):
    """Half of the rows of two ranks cross: one byte a channel there, two back."""
    slow = shapes.Ceilings(read_gbs=4550, fp8_tflops=1390, nvlink_gbs=37)
    flash = shapes.SHAPES["flash"]
    assert flash.wire_bytes(8192, 1) == 0
    assert shapes.floor_us(flash, 8192, 2, 32, slow) == pytest.approx(8192 * 6 / 2 * 3 * 4096 / 37e3)


def test_touched_experts_counts_this_rank_only(shapes):
    ids = [torch.tensor([[0, 5], [5, -1]]), torch.tensor([[4, 9]])]
    assert [shapes.touched_experts(ids, rank, 4) for rank in range(3)] == [1, 2, 1]
    assert shapes.busiest_touched([*ids, ids[0]], 4) == 2


def test_unknown_shapes_are_named(shapes):
    with pytest.raises(SystemExit, match="nope.*flash"):
        shapes.shape_of("nope", None)
    assert shapes.shape_of("v3", 4).experts_per_rank == 4


@pytest.mark.parametrize(
    "ids, padded, padded_to_8",
    [
        ([[[0, 1]], [[2, 3]]], 64.0, 8.0),  # every row fills a block of its own
        ([[[0, 0]] * 64, [[-1, -1]] * 64], 2.0, 2.0),  # all rows on one of two ranks
        ([[[0, 1]] * 64, [[2, 3]] * 64], 1.0, 1.0),
        ([[[0, 1]] * 65, [[2, 3]] * 63], 256 / 128, 144 / 128),
        ([[[-1, -1]], [[-1, -1]]], 1.0, 1.0),
    ],
)
def test_padded_work_of_the_busiest_rank(mega, ids, padded, padded_to_8):
    """4 experts on 2 ranks."""
    ids = [torch.tensor(each) for each in ids]
    assert mega.padded_work(ids, 4, 64) == mega.padded_work(ids, 4, 128) == padded
    assert mega.padded_work(ids, 4, 8) == padded_to_8


class OneRank:
    """Stands in for timing.Ranks."""

    rank, size, group, device = 0, 1, None, torch.device("cpu")

    def __init__(self):
        self.printed = []

    def max(self, values):
        return values

    def largest(self, values):
        return values

    def gather(self, tensor):
        return [tensor]

    def print(self, text):
        self.printed.append(text)


def test_inputs_follow_the_routing(mega):
    problem = deep_moe.Problem(num_experts=32, num_topk=4, hidden=128, intermediate=64, max_tokens_per_rank=4096)
    uniform, zipf = (
        mega.Inputs.random(problem, 4096, OneRank(), "zero-mean", routing) for routing in ("uniform", "zipf")
    )
    assert torch.equal(uniform.x, zipf.x)
    for inputs in (uniform, zipf):
        assert inputs.topk_weights.shape == (4096, 4) and (inputs.topk_weights > 0).all()
    assert mega.padded_work([uniform.topk_idx], 32, 64) < 1.1
    assert uniform.topk_idx.flatten().bincount().max() < 600 < 2000 < zipf.topk_idx.flatten().bincount().max()


def routers(size: int, routing: str = "uniform", topk: int = 6) -> list:
    """Those of all ranks, with 32 experts each."""
    problem = SimpleNamespace(num_experts=32 * size, num_topk=topk)
    ranks = [SimpleNamespace(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
    return [bench_module("routing").Router(problem, each, routing) for each in ranks]


@pytest.mark.parametrize(
    "size, routing, tokens",
    [(1, "uniform", 1), (1, "uniform", 8), (1, "uniform", 64), (2, "uniform", 1), (8, "uniform", 8)]
    + [(1, "zipf", 8), (4, "zipf", 4)],
)
def test_expected_number_of_touched_experts(size, routing, tokens):
    """Against random draws."""
    router, draws = routers(size, routing)[0], 200
    mean = sum(router.touched(tokens, number) for number in range(draws)) / draws
    assert router.expected(tokens) == pytest.approx(mean, abs=0.4)  # the draws' deviation is below 2 / 200 ** 0.5


def test_expected_number_by_hand():
    """One rank: 1 - (26 / 32) ** 8 of 32 experts. Two with one expert each: one of them, or both, in 3 of 4 cases."""
    assert routers(1)[0].expected(8) == pytest.approx(32 * (1 - (26 / 32) ** 8)) and routers(1)[0].expected(0) == 0
    halves = torch.tensor([0.5, 0.5])
    assert bench_module("routing").expected_busiest(halves, 1, 2) == pytest.approx(0.75)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 64])
def test_typical_routing_is_the_nearest_draw(shapes, size, tokens):
    """Every rank finds its part of the same draw, again and again."""
    routing, all_ranks = bench_module("routing"), routers(size)
    ids, weights = zip(*(router.typical(tokens) for router in all_ranks), strict=True)
    assert all(part.shape == (tokens, 6) and (part > 0).all() for part in weights)
    assert all(row.unique().numel() == 6 for part in ids for row in part)
    expected, busiest = all_ranks[0].expected(tokens), shapes.busiest_touched(list(ids), 32)
    numbers = [all_ranks[0].touched(tokens, number) for number in range(routing.DRAWS)]
    assert abs(busiest - expected) == min(abs(number - expected) for number in numbers)
    assert torch.equal(all_ranks[-1].typical(tokens)[0], ids[-1])


def test_ranks_and_rows_have_draws_of_their_own():
    first, second = routers(2)
    drawn = [first.draw(0, 8, 0), first.draw(1, 8, 0), first.draw(0, 8, 1), first.draw(0, 9, 0)]
    assert len({tuple(ids[:8].flatten().tolist()) for ids, _ in drawn}) == 4
    assert torch.equal(second.draw(1, 8, 0)[1], drawn[1][1])


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--set", "block_m"], "'block_m' is not FIELD=A,B"),
        (["--set", "block_m=64,x"], "'block_m=64,x' is not FIELD=A,B"),
        (["--set", "=1"], "names no field"),
        (["--set", "lag_blocks=8,8"], "a value twice"),
        (["--set", "lag_blocks=8", "--set", "lag_blocks=9"], "a field twice: lag_blocks"),
        (["--tokens", "1,9000"], "9000.*8192"),
        (["--tokens", "-1"], "from 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--experts-per-rank", "0"], "--experts-per-rank is 0"),
        (["--max-tokens", "-8"], "--max-tokens is -8"),
        (["--routing", "even"], "zipf"),
    ],
)
def test_sweep_refuses_nonsense(sweep, capsys, argv, words):
    with pytest.raises(SystemExit):
        sweep.arguments(argv)
    assert re.search(words, capsys.readouterr().err)


FLASH = deep_moe.Problem(num_experts=32, num_topk=6, hidden=4096, intermediate=2048, max_tokens_per_rank=8192)


def test_candidates_of_a_sweep(sweep):
    left_out = []
    settings = {"block_m": [64, 96], "lag_blocks": [8, 16]}
    found = sweep.candidates(FLASH, settings, 1, left_out.append)
    assert [each.name for each in found] == ["default", "block_m=64 lag_blocks=8", "block_m=64 lag_blocks=16"]
    assert len(left_out) == 2 and "block_m=96 lag_blocks=8 left out: block_m must be 8, 64 or 128" in left_out[0]
    assert [found[1].config_of(tokens, 1).bound_class for tokens in (0, 2, 3, 296, 297, 8192)] == [0, 0, 1, 1, 2, 2]
    assert [each.name for each in sweep.candidates(FLASH, {}, 1, left_out.append)] == ["default"]
    for settings, words in (
        ({"block": [64]}, "'block'; allowed: .*block_m"),
        ({"lag_blocks": [0]}, "lag_blocks.* is 0"),
    ):
        with pytest.raises(SystemExit, match=words):
            sweep.candidates(FLASH, settings, 1, left_out.append)


def test_table_of_a_sweep(sweep):
    """The default first, then by time, each with the variant that ran."""
    found = sweep.candidates(FLASH, {"block_m": [64, 128]}, 1, print)
    times = {"default": 200.0, "block_m=64": 300.0, "block_m=128": 100.0}
    title, header, *rows = (line.split() for line in sweep.table(found, times, 1024, 1).splitlines())
    assert "1024" in title and header == ["us", "ratio", "score", "bm", "lag", "unit", "ring", "candidate"]
    assert [(row[0], row[1], row[3], row[-1]) for row in rows] == [
        ("200.0", "1.000", "128", "default"),
        ("100.0", "0.500", "128", "block_m=128"),
        ("300.0", "1.500", "64", "block_m=64"),
    ]
    assert rows[0][2] == rows[1][2] < rows[2][2]  # the scores, of equal length


class FakeBuffer:
    """Holds what was staged; `fault` is added to what comes out."""

    fault = {}

    def __init__(self, group, problem, num_sms=None):
        self.problem, self.destroyed = problem, False

    def destroy(self):
        self.destroyed = True


@pytest.fixture
def tiny(monkeypatch, shapes):
    """A small shape. Its kernels are the reference."""
    shape = shapes.Shape("tiny", hidden=128, intermediate=128, topk=2, experts_per_rank=4)

    def stage(buffer, *inputs):
        buffer.staged = reference.stage(*inputs, 4)

    def call(y, l1, l2, buffer, num_tokens_bound):
        weights = testing.random_weights(buffer.problem, "zero-mean", seed=0, device="cpu")
        y.copy_(reference.layer(buffer.staged, weights.gate_up, weights.down))
        y += FakeBuffer.fault.get(dict(buffer.problem.overrides).get("lag_blocks"), 0.0)

    monkeypatch.setattr(FakeBuffer, "fault", {})
    monkeypatch.setattr(deep_moe, "SymmBuffer", FakeBuffer)
    monkeypatch.setattr(deep_moe, "stage", stage)
    monkeypatch.setattr(deep_moe, "fp8_mega_moe", call)
    return shape


def fake_timer(ranks):
    """Instead of ColdTimer: a clock that counts contenders from 10 µs on; they run, prepared."""

    def medians(contenders, repeats):
        for call, prepare in contenders.values():
            if prepare:
                prepare()
            call()
        return {name: 10.0 + index for index, name in enumerate(contenders)}

    return SimpleNamespace(medians=medians)


@pytest.fixture
def fake_layer(monkeypatch, sweep, tiny):
    """A sweep of the small shape."""
    args = sweep.arguments(["--max-tokens", "300", "--tokens", "0,70", "--set", "lag_blocks=2,3", "--repeats", "1"])
    monkeypatch.setattr(sweep, "ColdTimer", fake_timer)
    return sweep.Sweep(tiny, OneRank(), args)


def test_a_sweep_times_what_is_right(fake_layer):
    for tokens in (0, 70):
        text = fake_layer.run(tokens)
        assert [line.split()[0] for line in text.splitlines()[2:]] == ["10.0", "11.0", "12.0"]
        assert text.splitlines()[-1].endswith("lag_blocks=3")
    fake_layer.close()
    assert all(buffer.destroyed for buffer in fake_layer.buffers.values())


@pytest.mark.parametrize("field, words", [(None, "default is wrong with 70"), (3, "lag_blocks=3.*not the bits")])
def test_a_sweep_ends_at_a_wrong_result(fake_layer, field, words):
    FakeBuffer.fault[field] = 0.5
    with pytest.raises(SystemExit, match=words):
        fake_layer.run(70)


class FewTokens:
    """A peer that takes few tokens; it is the reference, too."""

    max_tokens, version, closed = 8, "few 1.0", False

    def __init__(self, shape, ranks, weights, max_tokens):
        self.weights = weights

    def stage(self, staged):
        self.staged = staged

    def call(self, y):
        y.copy_(reference.layer(self.staged, self.weights.gate_up, self.weights.down))

    def close(self):
        self.closed = True


def unsupported(shape, ranks, weights, max_tokens):
    """A peer that does not run here."""
    raise bench_module("peers").Unsupported("it needs the moon")


@pytest.fixture
def bench(monkeypatch, mega, shapes, tiny, h200):
    """A bench of the small shape with two peers, one of which refuses it."""
    monkeypatch.setattr(mega, "ColdTimer", fake_timer)
    monkeypatch.setattr(mega, "captured", lambda body: SimpleNamespace(replay=body))
    monkeypatch.setattr(mega, "host_us", lambda call: 5.0)
    monkeypatch.setattr(mega.peers, "load", {"few": FewTokens, "sad": unsupported}.__getitem__)
    args = mega.arguments(["--max-tokens", "300", "--tokens", "0", "--repeats", "1", "--peers", "few,sad"])
    return mega.Bench(tiny, OneRank(), h200, args)


def test_rows_of_a_bench(mega, bench):
    """Each peer is timed where it can run, and only there."""
    assert bench.ranks.printed == ["# peer sad left out: it needs the moon"]
    few = bench.peers["few"]
    for tokens, timed in ((0, False), (8, True), (9, False)):
        row = bench.row(tokens)
        assert not mega.wrong(row) and row["us"] == 10.0 and row["host_us"] == 5.0
        assert row["touched"] == (4 if tokens else 0)
        assert list(row["peers"]) == ["few"] * timed and ("| few" in mega.line(row)) == timed
        assert len(mega.line(row).split(" | ")[0]) == len(mega.HEADER)
    assert bench.row(8)["peers"]["few"]["ratio"] < 1 and few.staged.x.shape[0] == 8
    bench.close()
    assert few.closed and bench.buffer.destroyed


def test_stage_us_includes_staging(monkeypatch, bench):
    """Of the contenders it alone stages, and the graph of it is a contender of its own."""
    events, stage, call = [], deep_moe.stage, deep_moe.fp8_mega_moe
    monkeypatch.setattr(deep_moe, "stage", lambda *args: (events.append("stage"), stage(*args)))
    monkeypatch.setattr(deep_moe, "fp8_mega_moe", lambda *args, **kw: (events.append("call"), call(*args, **kw)))
    timed = {}

    def medians(contenders, repeats):
        for name, (body, _) in contenders.items():
            events.clear()
            body()
            timed[name] = list(events)
        return {name: 10.0 + index for index, name in enumerate(contenders)}

    monkeypatch.setattr(bench.timer, "medians", medians)
    assert bench.row(8)["stage_us"] == 12.0
    assert timed == {"us": ["call"], "graph_us": ["call"], "stage_us": ["stage", "call"], "few": []}


@pytest.mark.parametrize("wrong_graph", [0, 1])
def test_a_bench_ends_at_a_graph_that_gives_another_result(monkeypatch, mega, bench, wrong_graph):
    graphs = []

    def captured(body):
        graphs.append(SimpleNamespace(replay=body if len(graphs) != wrong_graph else lambda: None))
        return graphs[-1]

    monkeypatch.setattr(mega, "captured", captured)
    with pytest.raises(RuntimeError, match="tiny, 8 tokens: the replayed graph"):
        bench.row(8)
    assert len(graphs) == wrong_graph + 1


def test_a_bench_notices_a_wrong_result(mega, bench):
    assert not mega.wrong(bench.row(3))
    FakeBuffer.fault[None] = 0.5
    assert mega.wrong(bench.row(3))


def test_a_peer_may_be_missing_in_some_points_of_a_plot():
    rows = [{"tokens": tokens, "us": 2.0, "floor_us": 1.0, "peers": {}} for tokens in (1, 64)]
    rows[0]["peers"] = {"few": {"us": 4.0}}
    points = bench_module("plot").points_of(rows)
    assert points == {"deep_moe": [(1, 2.0, 0.5), (64, 2.0, 0.5)], "few": [(1, 4.0, 0.25)]}
