"""CASES "Numbers": 10, 11 and 13, and the error bars of the contract."""

from dataclasses import replace

import pytest
import torch

from deep_moe import _C, reference, testing
from deep_moe.config.problem import MMA_TYPES

# Issue: relative Frobenius error at hidden 7168, intermediate 2048 against the reference with the same requantisation.
BARS = {"zero-mean": 5e-3, "mean-0.3": 5e-3, "same-sign": 3e-3}
AGAINST_EXACT = 1.02  # times the reference's own error against float64 without requantisation


def check_bars(world, inputs, results, distribution: str) -> None:
    """Both bars of the contract; every rank."""
    operands = testing.layer_of(world.problem, world.weights)
    for given, error, result in zip(inputs, world.check(inputs, results, BARS[distribution]), results, strict=True):
        exact = reference.exact_layer(world.staged(given), *operands).cpu()
        ours, own = testing.error_of(result.y, exact), testing.error_of(world.expected(given), exact)
        print(f"{distribution}: {error}; against float64 {ours}, the reference itself {own}")
        assert ours.frobenius <= AGAINST_EXACT * own.frobenius
        assert abs(error.median_ratio - 1) < 2e-3, "biased: magnitude is lost or gained"


@pytest.mark.parametrize("distribution", BARS)
def test_error_bars_at_hidden_7168(worlds, distribution):
    """A chain over all of K, without promotion every 128, is off by 13 % on same-sign data and fails here."""
    world = worlds("7168x2048", distribution=distribution)
    inputs = world.inputs([16], distribution=distribution)
    check_bars(world, inputs, world.call(inputs), distribution)


def special_rows(world, counts) -> list[testing.RankInputs]:
    """10: zero rows, one huge element, amax of exactly 448 * 2^n, subnormal scales; odd top-k weights."""
    inputs = world.inputs(counts)
    for given in inputs:
        x, weights = given.x, given.topk_weights
        x[0] = 0
        x[1, 5] = 3e4
        x[2, :128] = torch.arange(128) * 3.5
        x[2, 127] = 448 * 4
        x[3] *= 1e-36
        x[4, 128:256] = 0
        x[5] *= 448 * 2**-9 / x[5].abs().max()
        weights[5] = torch.tensor([-1.0, 0.0, 0.5, -0.25])[: weights.shape[1]]
        weights[6] = 8.0 / weights.shape[1]
        weights[7] = 0.0
        weights[0] = 1e30  # of a zero row
    return inputs


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "e4m3"])
def test_special_values(worlds, quantised):
    """10, in both forms of `stage`."""
    world = worlds("main-2")
    inputs = [replace(given, quantised=quantised) for given in special_rows(world, [16, 9])]
    results = world.call_and_check(inputs)
    assert (results[0].y[0] == 0).all() and (results[0].y[7] == 0).all()


def test_both_forms_of_stage_give_the_same_bits(worlds):
    world = worlds("main-2")
    inputs = special_rows(world, [16, 9])
    quantised = [replace(given, quantised=True) for given in inputs]
    for a, b in zip(world.call(inputs), world.call(quantised), strict=True):
        assert testing.same_bits(a.y, b.y)


def test_staged_bytes_equal_the_reference(worlds):
    """`stage` alone: the symmetric buffer holds exactly what `reference.stage` says."""
    for name in ("main-2", "896-experts"):
        world = worlds(name)
        inputs = special_rows(world, [16, 9]) if name == "main-2" else world.inputs([16, 9], world.routing.with_holes)
        world.poison()

        def body(rank, inputs=inputs):
            given = inputs[rank.group.rank()]
            rank.stage(rank.put(given), routed_scaling_factor=2.5)
            rank.synchronize()
            n, buffer = given.num_tokens, rank.buffer
            return [view[:n].cpu() for view in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]

        for given, views in zip(inputs, world.run(body), strict=True):
            staged = reference.stage(given.x, given.topk_idx, given.topk_weights, world.problem.num_experts, 2.5)
            place = [_C.activation_byte_of(MMA_TYPES[world.problem.mma_type], k) for k in range(world.problem.hidden)]
            views[0] = views[0].view(torch.uint8)[:, place].view(views[0].dtype)
            for seen, wanted in zip(views, staged, strict=True):
                assert testing.same_bits(seen, wanted)


def test_routed_scaling_factor(worlds):
    world = worlds("main-2")
    world.call_and_check(world.inputs([12, 3], routed_scaling_factor=2.5))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_poison_in_one_token_touches_no_other(worlds, poison):
    """10: all other tokens of all ranks keep their bits."""
    world = worlds("main-2")
    inputs = world.inputs([16, 16])
    clean = world.call_and_check(inputs)
    inputs[0].x[3, 100] = poison
    inputs[1].topk_weights[7] = float("nan")
    results = world.call(inputs)
    for rank, odd in ((0, 3), (1, 7)):
        others = [t for t in range(16) if t != odd]
        assert testing.same_bits(results[rank].y[others], clean[rank].y[others])
        assert results[rank].y[odd].isnan().all()


@pytest.mark.parametrize("clamp", [None, 0.5, 10.0], ids=str)
def test_activations_far_beyond_the_clamp(worlds, clamp):
    """11."""
    world = worlds("main-2", clamp=clamp)
    inputs = world.inputs([16, 5])
    for given in inputs:
        given.x[::2] *= 200
    world.call_and_check(inputs)


# ---- 13: the same input gives the same bits --------------------------------------------------------------------------


def main_inputs(world, num_tokens: int):
    """The same global batch on any number of ranks of the main model, dealt in contiguous parts."""
    routing = testing.Routing.of(world.problem, 1)
    idx = routing.with_holes(0, num_tokens, testing.generator_of(7))
    weights = torch.rand(num_tokens, world.problem.num_topk, generator=testing.generator_of(8))
    batch = testing.RankInputs(testing.random_activations(world.problem, num_tokens, seed=9), idx, weights)
    return [take(batch, part) for part in torch.arange(num_tokens).tensor_split(world.num_ranks)]


def take(inputs: testing.RankInputs, tokens) -> testing.RankInputs:
    return testing.RankInputs(inputs.x[tokens], inputs.topk_idx[tokens], inputs.topk_weights[tokens])


def all_tokens(results) -> torch.Tensor:
    return torch.cat([result.y for result in results])


def test_same_bits_on_1_2_4_and_8_ranks(worlds, wanted_ranks):
    """Also across tile heights: the bounds fall in different classes."""
    seen = {}
    for ranks in sorted(wanted_ranks & {1, 2, 4, 8}):
        world = worlds(f"main-{ranks}")
        inputs = main_inputs(world, 64)
        for bound in {64, world.problem.max_tokens_per_rank}:
            results = world.call_and_check(inputs, bound=bound)
            seen[ranks, bound] = all_tokens(results)
        few = [take(given, slice(4)) for given in inputs]
        for result, whole in zip(world.call(few, bound=4), results, strict=True):
            assert testing.same_bits(result.y, whole.y[:4]), f"{ranks} ranks: 8-row tiles differ"
    first = next(iter(seen))
    for key, y in seen.items():
        assert testing.same_bits(y, seen[first]), f"(ranks, bound) {key} differs from {first}"


def test_same_bits_twice_and_in_any_batch(worlds):
    """Twice; one token alone against the same token in a batch of 512."""
    world = worlds("main-1")
    inputs = main_inputs(world, 512)
    y = all_tokens(world.call_and_check(inputs))
    assert testing.same_bits(y, all_tokens(world.call(inputs, seed=1)))
    for token in (0, 1, 300, 511):
        alone = [take(inputs[0], slice(token, token + 1))]
        for bound in (1, 64, None):  # tiles of 8, 64 and 128 rows
            assert testing.same_bits(world.call(alone, bound=bound)[0].y[0], y[token])


def test_same_bits_with_another_sm_count(worlds, device):
    first, second = (2, 5) if device == "cpu" else (132, 66)
    inputs = main_inputs(worlds("main-1"), 64)
    one = worlds("main-1", num_sms=first).call(inputs)
    other = worlds("main-1", num_sms=second).call(inputs)
    assert testing.same_bits(one[0].y, other[0].y)
