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


class Half:
    """A peer that runs a part of the layer, not too well."""

    max_tokens, part = 8, "the first half"

    def stage(self, staged):
        pass

    def call(self, y):
        pass

    def part_error(self):
        return 0.07


def test_a_peer_that_runs_a_part_checks_itself(mega, bench):
    """What it leaves in y is not looked at."""
    bench.peers["half"] = Half()
    row = bench.row(8)
    few, half = row["peers"].values()
    assert half == {"us": 14.0, "ratio": 10 / 14, "part": "the first half", "part_error": 0.07}
    assert "part" not in few and few["error_to_float64"] < 0.05
    assert mega.line(row).endswith("| half, the first half, 14.0 us, ratio 0.71, to f64 7.0e-02 (!)")


@pytest.mark.parametrize("name", ["sgl", "chain", "humming", "humming-128"])
def test_peers_refuse_weights_of_another_type(shapes, name):
    """Before they are imported."""
    peers = bench_module("peers")
    runs = peers.PEERS[name].mma_type
    other = {"fp8xfp8": "fp8xmxfp4", "fp8xmxfp4": "fp8xfp8"}[runs]
    with pytest.raises(peers.Unsupported, match=f"it runs {runs}, not {other}"):
        peers.load(name)(shapes.shape_of("flash", None, other), OneRank(), None, 64)


def test_missing_peers_are_named(monkeypatch, shapes):
    peers = bench_module("peers")
    with pytest.raises(SystemExit, match="unknown peer 'nope'; known: sgl, chain, humming, humming-128"):
        peers.load("nope")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.delitem(sys.modules, "peers.sgl", raising=False)
    with pytest.raises(SystemExit, match="peer sgl cannot be imported: .*deep_gemm"):
        peers.load("sgl")(shapes.SHAPES["flash"], OneRank(), None, 64)


class FakeHumming:
    """In place of humming-kernels: grouped GEMMs in plain torch, with the checks of its launcher.

    `swapped`: the first two experts that a launch has rows of get each other's weights; `skipped`: its last row is
    left out. `tiles` are the row counts that kernels were prepared for.
    """

    def __init__(self):
        self.swapped = self.skipped = False
        self.tiles = []

    class HummingLayer:
        def __init__(self, shape_n, shape_k, num_experts, weight_config, input_config, torch_dtype):
            assert (weight_config, torch_dtype) == ({"quant_method": "mxfp4"}, torch.bfloat16)
            assert input_config["dtype"] == "float8e4m3"
            self.shape, self.group = (num_experts, shape_n, shape_k), input_config["group_size"]
            self.locks = torch.zeros(2048, dtype=torch.int32)

        def load_from_tensors(self, tensors):
            (experts, n, k), self.tensors = self.shape, tensors
            assert tensors["weight"].shape == (experts, n, k // 2)
            assert tensors["weight_scale"].shape == (experts, n, k // 32)
            assert {tensor.dtype for tensor in tensors.values()} == {torch.uint8}

        def transform(self):
            self.weight, self.weight_scale = self.tensors["weight"], self.tensors["weight_scale"]
            self.weight_scale_2 = torch.ones(self.shape[0])
            self.humming_config = SimpleNamespace(to_str=lambda: str(self.group))

    def get_heuristics_config(self, config, shape_m, gemm_type, use_m_major_input_scale, device):
        assert gemm_type == "grouped_contiguous"
        return {"rows": shape_m, "m_major": use_m_major_input_scale}

    def prepare_kernels(self, config, options, tile, device):
        assert options["use_m_major_input_scale"] == tile["m_major"] == (config != "0")
        self.tiles.append(tile["rows"])
        return int(config), tile

    def launch_kernel(
        self, configs, inputs, weight, weight_scale, weight_scale_2, input_scale, outputs, expert_layout, locks
    ):
        group, tile = configs
        (rows, k), experts = inputs.shape, weight.shape[0]
        groups = k // group if group else 1
        assert tile["rows"] == rows == outputs.shape[0] and weight_scale_2.shape == (experts,)
        assert input_scale.shape == ((groups, -(-rows // 4) * 4) if tile["m_major"] else (rows, groups))
        assert input_scale.is_contiguous() and inputs.is_contiguous() and outputs.is_contiguous()
        assert expert_layout.dtype is torch.int32 and expert_layout.shape == (experts + 1,)
        scales = input_scale.T[:rows] if tile["m_major"] else input_scale
        values = inputs.float() * scales.repeat_interleave(k // groups, 1)
        starts = expert_layout.tolist()
        used = [expert for expert in range(experts) if starts[expert] < starts[expert + 1]]
        for position, expert in enumerate(used):
            own = slice(starts[expert], starts[expert + 1] - (self.skipped and expert == used[-1]))
            at = used[1 - position] if self.swapped and position < 2 else expert
            outputs[own] = (values[own] @ reference.dequantize_mxfp4(weight[at], weight_scale[at]).T).bfloat16()


@pytest.fixture
def humming(monkeypatch):
    """(bench/peers/humming.py, the fake package below it)."""
    fake = FakeHumming()
    ops = SimpleNamespace(launch_kernel=fake.launch_kernel)
    nvrtc = SimpleNamespace(get_nvrtc_library_path=lambda: "/opt/nvrtc/libnvrtc.so.13")
    modules = {
        "humming": SimpleNamespace(__version__="0.1.19", ops=ops),
        "humming.kernel": SimpleNamespace(),
        "humming.kernel.humming": SimpleNamespace(HummingKernel=fake),
        "humming.layer": SimpleNamespace(HummingLayer=fake.HummingLayer),
        "humming.tune": SimpleNamespace(get_heuristics_config=fake.get_heuristics_config),
        "humming.utils": SimpleNamespace(),
        "humming.utils.nvrtc": nvrtc,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "peers.humming", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib::/opt/nvrtc/")
    monkeypatch.setenv("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    yield bench_module("peers.humming"), fake
    sys.modules.pop("peers.humming")


MXFP4_SHAPE = dict(hidden=256, intermediate=128, topk=2, experts_per_rank=4, mma_type="fp8xmxfp4")


def mxfp4_layer(shapes, tokens: int, pattern: str = "random", **options):
    """(shape, weights, staged tokens) of a small MXFP4 layer."""
    shape = shapes.Shape("tiny", **MXFP4_SHAPE | options)
    problem, generator = shape.problem(1, 64), testing.generator_of(3)
    ids = getattr(testing.Routing.of(problem, 1), pattern)(0, tokens, generator)
    x = testing.random_activations(problem, tokens)
    staged = reference.stage(x, ids, torch.rand(tokens, 2, generator=generator), 4)
    return shape, testing.random_weights(problem, seed=1), staged


@pytest.mark.parametrize("name", ["Peer", "PeerPer128"])
@pytest.mark.parametrize("tokens, pattern, clamp", [(1, "random", None), (37, "random", 0.5), (30, "with_holes", None)])
def test_humming_multiplies_the_rows_of_the_layer(shapes, humming, name, tokens, pattern, clamp):
    """Its L2 rows, added up by token, are the layer but for the requantisation; the call itself writes no y."""
    module, fake = humming
    shape, weights, staged = mxfp4_layer(shapes, tokens, pattern, activation_clamp=clamp)
    peer = getattr(module, name)(shape, OneRank(), weights, 64)
    peer.stage(staged)
    pairs = [pair for pair in staged.topk_idx.flatten().argsort(stable=True) if staged.topk_idx.flatten()[pair] >= 0]
    for gemm in (peer.l1, peer.l2):
        testing.poison(gemm.y)
    y = testing.poison(torch.empty(tokens, 256, dtype=torch.bfloat16))
    peer.call(y)
    assert testing.is_poison(y).all() and fake.tiles == [len(pairs)] * 2
    assert 0 < peer.part_error() < 5e-3
    total = torch.zeros(tokens, 256, dtype=torch.float64).index_add_(0, torch.stack(pairs) // 2, peer.l2.y.double())
    exact = reference.exact_layer(staged, weights.gate_up, weights.down, reference.Activation(clamp=clamp))
    assert testing.error_of(total, exact).frobenius < 0.05


@pytest.mark.parametrize("name", ["Peer", "PeerPer128"])
def test_humming_quantises_as_its_kernels_read(shapes, humming, name):
    """One scale a row, or those of `reference.quantize_rows`."""
    module, _ = humming
    shape, weights, staged = mxfp4_layer(shapes, 5)
    peer = getattr(module, name)(shape, OneRank(), weights, 64)
    assert peer.version.startswith("humming-kernels 0.1.19: GEMMs alone, a scale per token")
    values = torch.randn(5, 256) * torch.logspace(-20, 3, 5)[:, None]
    values[1] = 0
    rows = module.Rows.of(values, peer.group)
    assert rows.codes.dtype is torch.float8_e4m3fn and rows.scales.dtype is torch.float32
    if peer.group:
        codes, scales = reference.quantize_rows(values)
        assert torch.equal(rows.scales, scales) and testing.error_of(rows.codes.float(), codes.float()).frobenius < 1e-2
    else:
        assert rows.scales.shape == (5, 1) and (rows.codes.float().abs().amax(1)[2:] == 448).all()
    assert testing.error_of(rows.double()[2:], values[2:]).worst_row < 0.05
    taken = rows.take(torch.tensor([4, 2]))
    assert torch.equal(taken.double(), rows.double()[[4, 2]])


@pytest.mark.parametrize("fault", ["swapped", "skipped"])
@pytest.mark.parametrize("gemm", ["l1", "l2"])
def test_humming_notices_a_wrong_gemm(shapes, humming, fault, gemm):
    module, fake = humming
    shape, weights, staged = mxfp4_layer(shapes, 20)
    peer = module.PeerPer128(shape, OneRank(), weights, 64)
    peer.stage(staged)
    peer.call(None)
    assert peer.part_error() < 5e-3
    setattr(fake, fault, True)
    testing.poison(getattr(peer, gemm).y)
    getattr(peer, gemm).launch()
    assert peer.part_error() > 0.05


def test_humming_prepares_once_for_the_same_tokens(shapes, humming):
    """The timer stages before every sample."""
    module, fake = humming
    shape, weights, staged = mxfp4_layer(shapes, 6)
    peer = module.Peer(shape, OneRank(), weights, 64)
    for _ in range(2):
        peer.stage(staged)
    assert fake.tiles == [12, 12]
    peer.stage(mxfp4_layer(shapes, 3)[2])
    assert fake.tiles == [12, 12, 6, 6] and len(peer.l2.y) == 6
    peer.close()


def test_humming_says_what_it_does_not_run(monkeypatch, shapes, humming):
    module, _ = humming
    peers, shape = bench_module("peers"), shapes.Shape("tiny", **MXFP4_SHAPE)
    with pytest.raises(peers.Unsupported, match="one rank, and there are 2"):
        module.Peer(shape, SimpleNamespace(size=2), None, 64)
    with pytest.raises(peers.Unsupported, match="hidden 192.*multiples of 128"):
        module.Peer(shapes.Shape("odd", **MXFP4_SHAPE | {"hidden": 192}), OneRank(), None, 64)
    for path in ("", "/usr/lib"):
        monkeypatch.setenv("LD_LIBRARY_PATH", path)
        with pytest.raises(SystemExit, match="export LD_LIBRARY_PATH=/opt/nvrtc"):
            module.Peer(shape, OneRank(), None, 64)

    def missing():
        raise RuntimeError("No suitable CUDA 13 environment found")

    monkeypatch.setattr(module, "get_nvrtc_library_path", missing)
    with pytest.raises(SystemExit, match="finds no NVRTC.*No suitable CUDA 13"):
        module.Peer(shape, OneRank(), None, 64)
