"""MXFP4 weights: every tile height, every code with every exponent, scale patterns that are hard, and how they meet the
protocol. What the other cases ask of FP8 they ask of MXFP4 with `--mma-type fp8xmxfp4`."""

from dataclasses import replace

import pytest
import torch
from mxfp4_cases import random_mxfp4

import deep_moe
from deep_moe import _C, testing
from deep_moe.testing.mutation import subnormal_weights

HEIGHTS = [8, 16, 24, 32, 64, 128]
WAYS = {}, dict(block_m=128, decode_ahead=0), dict(block_m=128, decode_ahead=1)  # in registers; decode warps; ahead
LARGEST = 127  # exponent code of a block's largest group in these tests


def problem_of(**fields) -> deep_moe.Problem:
    sizes = dict(num_experts=2, num_topk=1, hidden=320, intermediate=160, max_tokens_per_rank=12)
    return deep_moe.Problem(**(sizes | fields), mma_type="fp8xmxfp4")


def check_weights(device, weights, problem) -> None:
    """A call with these weights against the reference on what they are encoded to, which must be exact; by all three
    ways to decode them."""
    for forced in WAYS:
        with testing.World(replace(problem, overrides=forced), 1, device, weights) as world:
            assert all(part.report.groups == 0 for part in (world.ranks[0].l1, world.ranks[0].l2))
            world.call_and_check(world.inputs([problem.max_tokens_per_rank]))


def test_there_is_a_kernel_of_every_height(worlds):
    world = worlds("mxfp4-2")
    assert [config.block_m for config in world.problem.configs(2)] == HEIGHTS


@pytest.mark.parametrize("geometry", ["mxfp4-2", "mxfp4-even"])
@pytest.mark.parametrize("block_m", HEIGHTS)
def test_every_height(worlds, block_m, geometry):
    """As many tokens as its class may have, with holes, duplicates, and an idle rank."""
    world = worlds(geometry)
    bound = world.bound_of(block_m)
    for pattern in (world.routing.random, world.routing.with_holes, world.routing.duplicates):
        world.call_and_check(world.inputs([bound, bound - 1], pattern), bound=bound)
    world.call_and_check(world.inputs([0, bound]), bound=bound)
    world.call_and_check(world.inputs([bound, 1], quantised=True), bound=bound)


def test_same_bits_at_every_height(worlds):
    world = worlds("mxfp4-2")
    counts = [world.bound_of(8)] * 2
    for pattern in (world.routing.random, world.routing.to_expert(3)):
        inputs = world.inputs(counts, pattern)
        first, *others = (world.call(inputs, bound=world.bound_of(block_m)) for block_m in HEIGHTS)
        world.check(inputs, first)
        for results in others:
            assert all(testing.same_bits(a.y, b.y) for a, b in zip(first, results, strict=True))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24, 25, 63, 64, 65, 127, 128])
def test_rows_of_one_expert(worlds, rows):
    """A row less and more than tiles of 8, 24 and 64 rows, on the largest; the other expert has none."""
    world = worlds("mxfp4-2")
    tokens = (rows + 1) // 2
    inputs = world.inputs([tokens, rows // 2], world.routing.to_expert(1))
    for given in inputs:
        given.topk_idx[:, 1] = -1
    world.call_and_check(inputs, bound=world.problem.max_tokens_per_rank)


@pytest.mark.parametrize("geometry", ["mxfp4-warps", "mxfp4-warps-short", "mxfp4-ahead", "mxfp4-ahead-short"])
def test_weights_decoded_to_shared_memory(worlds, geometry):
    """Blocks of 128 rows: short and full ones, experts without rows; where weights are decoded ahead, many readers of a
    chunk and one, and slots that are used many times."""
    world = worlds(geometry)
    ranks, most = len(world.ranks), world.problem.max_tokens_per_rank
    patterns = [world.routing.random, world.routing.with_holes, world.routing.to_expert(1)]
    for counts, pattern in zip([[most, most - 1], [1, 130], [most, 0]], patterns, strict=True):
        world.call_and_check(world.inputs(counts[:ranks], pattern))
    world.call_and_check(world.inputs([0] * ranks))
    world.call_and_check(world.inputs([most] * ranks, quantised=True))


def test_weights_decoded_ahead_give_the_same_bits(worlds):
    """As those that every tile decodes for itself, in registers or to shared memory."""
    ahead = worlds("mxfp4-ahead")
    inputs = ahead.inputs([130, 290])
    expected = ahead.call(inputs)
    for forced in (dict(block_m=64), dict(block_m=128, decode_ahead=0)):
        problem = replace(ahead.problem, overrides=forced)
        with testing.World(problem, 2, ahead.ranks[0].buffer.device, ahead.weights) as other:
            results = zip(expected, other.call(inputs), strict=True)
            assert all(testing.same_bits(a.y, b.y) for a, b in results)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 20])
def test_biases_and_swigluoai(worlds, tokens):
    """Up to four tokens rows are loaded from where they were staged."""
    world = worlds("mxfp4-oss", clamp=5.0)
    inputs = world.inputs([tokens])
    inputs[0].x[::2] *= 30
    inputs[0].topk_weights[::3] *= -1
    bounds = [bound for bound in world.problem.bound_classes(1) if bound >= tokens]
    first, *others = (world.call(inputs, bound=bound) for bound in bounds)
    world.check(inputs, first)
    for results in others:
        assert testing.same_bits(first[0].y, results[0].y)


def test_ring_that_wraps(worlds, seed):
    """Tiles of more K blocks than stages, more blocks than the ring has."""
    world = worlds("mxfp4-wrap")
    world.call_and_check(world.inputs([64, 50]), seed=seed)


@pytest.mark.parametrize("spread", [0, 1, 11, 14])
def test_every_code_with_every_exponent(device, spread):
    """Exponents up to `spread` below a block's largest; from 12 on magnitudes are e4m3 subnormals."""
    problem = problem_of()
    weights = random_mxfp4(problem, (LARGEST - spread, LARGEST + 1), seed=spread)
    for codes, scales in (weights.gate, weights.up, weights.down):
        scales[:, ::7, ::3] = LARGEST
        found = torch.stack([codes & 15, codes >> 4]).unique()
        assert len(found) == 16 and len(scales.unique()) == spread + 1
    check_weights(device, scaled_down(weights), problem)


@pytest.mark.parametrize("forced", WAYS, ids=["registers", "warps", "ahead"])
def test_every_magnitude_that_is_an_e4m3_subnormal(device, forced):
    """Of each expert one magnitude, whose exponents are the smallest but for weights that are multiplied by zero: a
    wrong entry of a decoder's tables is a wrong result."""
    problem = problem_of(num_experts=7, hidden=512, intermediate=256, max_tokens_per_rank=28, overrides=forced)
    with testing.World(problem, 1, device, subnormal_weights(problem)) as world:
        assert all(part.report.groups == 0 for part in (world.ranks[0].l1, world.ranks[0].l2))
        inputs = world.inputs([28])
        inputs[0].x[:, torch.arange(problem.hidden) % 128 // 32 == 1] = 0
        inputs[0].topk_idx[:, 0] = torch.arange(28) % 7
        world.call_and_check(inputs)


def scaled_down(weights: testing.Weights) -> testing.Weights:
    """So that sums stay near 1: all exponents lower by as much."""
    parts = [(codes, scales - 12) for codes, scales in (weights.gate, weights.up, weights.down)]
    return testing.Weights(*parts)


PATTERNS = {
    "rows": lambda row, group: row % 2 * 14,  # neighbouring rows 14 binades apart
    "rows apart": lambda row, group: row // 8 % 2 * 14,  # the two rows of a lane
    "groups": lambda row, group: group % 2 * 14,  # the two groups of 64 channels
    "halves": lambda row, group: group // 2 % 2 * 14,  # of a K block
    "blocks": lambda row, group: (row // 128 + group // 4) % 2 * 40,  # whole blocks
    "one outlier": lambda row, group: torch.where((row % 128 == 77) & (group % 4 == 2), 0, 14),
    "one normal": lambda row, group: torch.where((row == 5) & (group == 1), 0, 13),
    "all smallest": lambda row, group: row * 0 + group * 0 + 40,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scale_patterns(device, pattern):
    """Exponents far apart where a lane, a warp or a block could mix them up."""
    problem = problem_of()
    weights = random_mxfp4(problem, (LARGEST, LARGEST + 1), seed=3)
    for _, scales in (weights.gate, weights.up, weights.down):
        rows, groups = (torch.arange(size) for size in scales.shape[1:])
        scales.copy_(scales - PATTERNS[pattern](rows[:, None], groups[None]).to(torch.uint8))
    check_weights(device, scaled_down(weights), problem)


def test_groups_rows_and_blocks_of_zeros(device):
    """Of either sign; whatever exponent they come with counts for nothing."""
    problem = problem_of()
    weights = scaled_down(random_mxfp4(problem, (LARGEST - 3, LARGEST + 1), seed=5))
    for codes, scales in (weights.gate, weights.up, weights.down):
        codes[:, ::3, :16] = 0
        codes[:, 1::3, 16:32] = 0x88
        codes[0, :128, :64] = 0
        scales[:, ::3, 0] = 254
        scales[:, 1::3, 1] = 0
    check_weights(device, weights, problem)


def test_rounded_groups_are_what_the_report_says(device):
    """Beyond 15 binades: the kernel multiplies what `dequantize` and the reference say."""
    problem = problem_of()
    weights = random_mxfp4(problem, (LARGEST - 20, LARGEST + 1), seed=7)
    for _, scales in (weights.gate, weights.up, weights.down):
        scales[:, ::5, ::2] = LARGEST
    with pytest.warns(UserWarning):
        world = testing.World(problem, 1, device, scaled_down(weights))
    with world:
        assert world.ranks[0].l1.report.groups > 0
        world.call_and_check(world.inputs([12]))


def test_nan_and_zero_tokens(worlds):
    """A NaN stays in its token; a token of zeros gives zeros."""
    world = worlds("mxfp4-2")
    inputs = world.inputs([6, 6])
    inputs[1].x[2] = 0
    clean = world.call_and_check(inputs)
    inputs[0].x[3, 100] = float("nan")
    results = world.call(inputs)
    others = [t for t in range(6) if t != 3]
    assert testing.same_bits(results[0].y[others], clean[0].y[others]) and testing.same_bits(results[1].y, clean[1].y)
    assert results[0].y[3].isnan().all() and (results[1].y[2] == 0).all()


def test_each_op_refuses_the_buffer_of_the_other(device):
    for mma_type, op in (("fp8xfp8", deep_moe.fp8_mxfp4_mega_moe), ("fp8xmxfp4", deep_moe.fp8_mega_moe)):
        problem = replace(problem_of(), mma_type=mma_type)

        def body(group, problem=problem, op=op):
            buffer = deep_moe.SymmBuffer(group, problem)
            y = torch.empty(1, problem.hidden, dtype=torch.bfloat16, device=buffer.device)
            try:
                with pytest.raises(ValueError, match=f"mma_type {problem.mma_type!r}.*call deep_moe.fp8_"):
                    op(y, None, None, buffer)
            finally:
                buffer.destroy()

        deep_moe.LocalGroup(1, device).run(body)


def test_weights_of_the_kernel_take_17_bytes_for_32(worlds):
    """4.25 bits a weight, padded to tiles; FP8 has 8."""
    config = worlds("mxfp4-2").problem.configs(2)[0]
    fp8 = config.replace(mma_type=_C.MmaType.Fp8xFp8, block_m=8)
    assert _C.l1_weight_bytes(config) * 32 == _C.l1_weight_bytes(fp8) * 17
