"""CASES "Numbers": 11, the activations with their numbers, and expert biases."""

from dataclasses import replace

import pytest
import torch

from cases.few import check_bits_of_all_heights
from deep_moe import testing

BEYOND = 30.0  # times the usual activations, of which gate and up are near 1: beyond any clamp here
# Not the 7 of gpt-oss: there the value of up at its lower limit is -6/8 of the value at its upper one, which is a whole
# group's largest, and 6/8 of 448 lies in the middle between two codes, so that the last bit of a sigmoid decides.
LIMIT = 5.0


def spread(inputs: list[testing.RankInputs]) -> list[testing.RankInputs]:
    """Half of the tokens far beyond the clamp, one of zeros; top-k weights of all kinds."""
    for given in inputs:
        x, weights = given.x, given.topk_weights
        x[::2] *= BEYOND
        x[3:4] = 0
        weights[1::5] *= -1
        weights[2::5, 0] = 0
        weights[4::5] *= 8
    return inputs


@pytest.mark.parametrize("block_m", [8, 64, 128])
@pytest.mark.parametrize("name", ["oss-1", "oss-2"])
def test_swigluoai_with_biases(worlds, name, block_m):
    """With 128 rows also tiles of more than 64, whose warpgroups hold 64 rows each."""
    world = worlds(name, clamp=LIMIT)
    bound = world.bound_of(block_m)
    world.call_and_check(spread(world.inputs([bound] + [bound - 3] * (world.num_ranks - 1))), bound=bound)


def test_same_bits_with_biases_at_every_tile_height(worlds):
    """8-row tiles of one rank alone, with rows that are pulled (5 tokens) and that are not, and of two ranks."""
    for name, counts in (("oss-1", [4]), ("oss-1", [5]), ("oss-2", [4, 5])):
        world = worlds(name, clamp=LIMIT)
        counts = [min(count, world.bound_of(8)) for count in counts]
        for pattern in (world.routing.random, world.routing.with_holes):
            check_bits_of_all_heights(world, spread(world.inputs(counts, pattern)))


def test_same_bits_with_biases_on_1_and_2_ranks(worlds):
    one, two = (worlds(name, clamp=LIMIT) for name in ("oss-1", "oss-2"))
    of_two = spread(two.inputs([80, 80]))
    together = testing.RankInputs(
        *(torch.cat([getattr(given, name) for given in of_two]) for name in ("x", "topk_idx", "topk_weights"))
    )
    y = one.call_and_check([together])[0].y
    assert testing.same_bits(y, torch.cat([result.y for result in two.call(of_two)]))


@pytest.mark.parametrize("clamp", [None, 0.5, 10.0], ids=str)
def test_biases_come_before_the_clamp(worlds, clamp):
    """11, with "swiglu": biases lift sums over the clamp, which then cuts them."""
    world = worlds("swiglu-bias", clamp=clamp)
    inputs = world.inputs([40])
    inputs[0].x[::2] *= BEYOND
    inputs[0].x[1::4] = 0  # nothing but biases
    world.call_and_check(inputs)


@pytest.mark.parametrize("clamp, alpha", [(LIMIT, None), (0.5, None), (10.0, 0.3), (3.0, 4.0)])
def test_alpha_and_limit(worlds, clamp, alpha):
    """11."""
    world = worlds("swigluoai", clamp=clamp, alpha=alpha)
    world.call_and_check(spread(world.inputs([30])))


def test_numbers_of_the_activation_are_those_of_the_problem(worlds):
    """Layers that differ in them share a kernel, not a result."""
    first, second, third = (
        worlds("swigluoai", **numbers) for numbers in (dict(), dict(alpha=4.0, clamp=3.0), dict(clamp=3.0))
    )
    inputs = spread(first.inputs([9]))
    ys = [world.call(inputs)[0].y for world in (first, second, third)]
    assert not any(testing.same_bits(ys[a], ys[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("block_m", [8, 64, 128])
def test_a_weight_of_zero_leaves_no_bias(worlds, block_m):
    world = worlds("oss-2")
    bound = world.bound_of(block_m)
    inputs = world.inputs([min(5, bound), 4])
    for given in inputs:
        given.topk_weights[1] = 0
    for result in world.call_and_check(inputs, bound=bound):
        assert (result.y[1] == 0).all() and (result.y[0] != 0).any()


@pytest.mark.parametrize("block_m", [8, 64, 128])
def test_nan_with_biases_stays_in_its_token(worlds, block_m):
    """Also one that meets the limit, and a NaN weight, with which the bias of down is multiplied."""
    world = worlds("oss-2")
    bound = world.bound_of(block_m)
    tokens = min(5, bound)
    inputs = world.inputs([tokens, tokens])
    clean = world.call_and_check(inputs, bound=bound)
    inputs[0].x[3, 100] = float("nan")
    inputs[1].topk_weights[2, 1] = float("nan")
    results = world.call(inputs, bound=bound)
    for rank, odd in ((0, 3), (1, 2)):
        others = [t for t in range(tokens) if t != odd]
        assert testing.same_bits(results[rank].y[others], clean[rank].y[others])
        assert results[rank].y[odd].isnan().all()


def test_biases_reloaded_in_place(worlds):
    """27, for biases alone: `out=` keeps their addresses, and the cached plan uses the new ones."""
    world, fresh = worlds("swiglu-bias", weights_seed=5), worlds("swiglu-bias", weights_seed=6)
    inputs = world.inputs([10])
    old = world.call_and_check(inputs)
    mixed = replace(world.weights, biases=fresh.weights.biases)

    def reload(rank):
        before = rank.l1.bias.data_ptr(), rank.l2.bias.data_ptr()
        l1, l2 = mixed.transform(rank.problem, out=(rank.l1, rank.l2))
        assert l1 is rank.l1 and l2 is rank.l2 and (l1.bias.data_ptr(), l2.bias.data_ptr()) == before

    world.run(reload)
    results = world.call(inputs)
    assert not testing.same_bits(old[0].y, results[0].y)
    world.weights = mixed
    world.check(inputs, results)
    world.broken = True  # its weights are no longer those of its key
