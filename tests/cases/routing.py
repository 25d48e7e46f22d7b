"""CASES "Routing and counts": 1 to 7."""

import itertools
from dataclasses import replace

import pytest
import torch

import deep_moe
from deep_moe import testing

COUNTS = (0, 1, 7, 8, 31, 32, 33, 64, 65, 200)


def test_two_ranks_of_eight_tokens_to_one_expert(worlds):
    """1: 64 rows for one expert, from a local count of 8."""
    world = worlds("main-2")
    world.call_and_check(world.inputs([8, 8], world.routing.to_expert(3)), bound=8)


@pytest.mark.parametrize("first", COUNTS)
def test_every_ordered_pair_of_counts(worlds, first):
    """2: nothing may follow from the local count."""
    world = worlds("small")
    for i, second in enumerate(COUNTS):
        world.call_and_check(world.inputs([first, second], seed=i), seed=i)


@pytest.mark.parametrize("first, second", list(itertools.product((0, 1, 33, 57), repeat=2)))
def test_counts_within_the_small_class(worlds, first, second):
    world = worlds("small")
    wanted = {"fp8xfp8": (16, 57, 200), "fp8xmxfp4": (5, 12, 20, 27, 200)}
    assert world.problem.bound_classes(2) == wanted[world.problem.mma_type]
    bound = min(most for most in world.problem.bound_classes(2) if most >= max(first, second, 17))
    world.call_and_check(world.inputs([first, second]), bound=bound)


def test_counts_within_the_first_class(worlds):
    """Tiles of 8 rows."""
    world = worlds("small")
    for first, second in itertools.product((0, 1, 8, 9, 16), repeat=2):
        world.call_and_check(world.inputs([first, second], seed=first), bound=16, seed=second)


@pytest.mark.parametrize("block_m", [8, 64])
@pytest.mark.parametrize("name", ["main-1", "main-2", "main-4", "main-8"])
def test_random_routing_with_different_counts(worlds, name, block_m, seed):
    world = worlds(name)
    bound = world.bound_of(block_m)
    counts = [(17 * rank + 40 * (rank % 2) + 5) % (min(bound, 64) + 1) for rank in range(world.num_ranks)]
    world.call_and_check(world.inputs(counts, seed=seed), bound=bound, seed=seed)


@pytest.mark.parametrize("name", ["main-2", "main-4"])
def test_holes_in_the_middle_and_whole_tokens_without_experts(worlds, name):
    """3: -1 in the middle of a token's slots, and tokens with nothing but -1."""
    world = worlds(name)
    inputs = world.inputs([13] * world.num_ranks, world.routing.with_holes)
    results = world.call_and_check(inputs)
    for result in results:
        assert (result.y[0] == 0).all()


@pytest.mark.parametrize("silent", [[0], [1], [0, 1]], ids=str)
def test_ranks_whose_ids_are_all_minus_one(worlds, silent):
    """3: one rank, then all ranks, without a single expert: zeros, not poison."""
    world = worlds("main-2")
    inputs = world.inputs([9, 20])
    for rank in silent:
        inputs[rank].topk_idx.fill_(-1)
    results = world.call_and_check(inputs)
    for rank in silent:
        assert (results[rank].y == 0).all()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 0, 5, 0], [7, 0, 3, 2]], ids=str)
def test_ranks_without_tokens(worlds, counts):
    """3: zero tokens on one rank, on all but one, on all."""
    world = worlds("main-4")
    world.call_and_check(world.inputs(counts))


def patterns(routing: testing.Routing) -> dict[str, testing.Pattern]:
    last = routing.num_ranks - 1
    return {
        "to the first rank": routing.to_rank(0),
        "to the last rank": routing.to_rank(last),
        "to the first expert": routing.to_expert(0),
        "to the last expert": routing.to_expert(routing.num_experts - 1),
        "none remote": routing.local_only,
        "one row per expert": routing.one_row_per_expert,
        "duplicates": routing.duplicates,
    }


@pytest.mark.parametrize("pattern", patterns(testing.Routing(2, 1, 2)))
@pytest.mark.parametrize("name", ["main-2", "main-4"])
def test_lopsided_routing(worlds, name, pattern):
    """4."""
    world = worlds(name)
    inputs = world.inputs([24] * world.num_ranks, patterns(world.routing)[pattern])
    if pattern == "one row per expert":
        assert (world.expected_stats(inputs) == 1).all()
    world.call_and_check(inputs)
    few = world.inputs([4] * world.num_ranks, patterns(world.routing)[pattern])
    world.call_and_check(few, bound=4)  # of the 8-row tiles


def test_an_expert_with_129_rows(worlds):
    """4: one row more than a tile of 128, and than two of 64."""
    for bound in (None, 64):
        world = worlds("main-4")
        inputs = world.inputs([33, 32, 64, 0], world.routing.first_slot_to_expert(5))
        assert world.expected_stats(inputs).flatten()[5] == 129
        world.call_and_check(inputs, bound=bound)
    world = worlds("small")
    world.call_and_check(world.inputs([65, 64], world.routing.to_expert(1)))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 56, 57, 63, 64, 65, 72, 73, 96, 97, 112])
def test_a_hot_expert_at_every_threshold(worlds, rows):
    """4: boxes and blocks of 8 rows, half and whole blocks of 64 and 128, one row more and less; from both ranks."""
    world = worlds("small")
    counts = [rows - rows // 2, rows // 2]
    inputs = world.inputs(counts, world.routing.to_expert(1), seed=rows)
    assert world.expected_stats(inputs).flatten().tolist() == [0, rows]
    for bound in world.problem.bound_classes(world.num_ranks):
        if bound >= max(counts):
            world.call_and_check(inputs, bound=bound)


@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 9, 33, 55])
def test_a_hot_rank_at_thresholds(worlds, tokens):
    """4: every token of every rank goes to the experts of one rank."""
    world = worlds("main-4")
    inputs = world.inputs([tokens, 0, tokens, 1], world.routing.to_rank(2), seed=tokens)
    world.call_and_check(inputs, bound=4 if tokens <= 4 else None)  # 4: 8-row tiles


def test_padding_rows_with_real_ids_change_nothing(worlds):
    """5: a graph batch of 64 rows of which 5 and 0 count; the rest is NaN with a real expert id."""
    world = worlds("main-2")
    inputs = world.inputs([5, 0])
    plain = world.call_and_check(inputs)
    batch = [testing.padded(given, 64, expert=3) for given in inputs]
    results = world.call_and_check(batch)
    assert testing.same_bits(results[0].y[:5], plain[0].y)


def test_nan_rows_with_minus_one_ids_change_nothing(worlds):
    """5: counted rows, NaN activations, no expert: zeros, and the others as if alone."""
    world = worlds("main-2")
    inputs = world.inputs([20, 20])
    plain = world.call_and_check(inputs)
    for given in inputs:
        given.x[10:] = float("nan")
        given.topk_idx[10:] = -1
    results = world.call_and_check(inputs)
    for before, after in zip(plain, results, strict=True):
        assert testing.same_bits(before.y[:10], after.y[:10])
        assert (after.y[10:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_dtypes(worlds, dtype):
    """6."""
    world = worlds("main-2")
    inputs = world.inputs([10, 3], world.routing.with_holes)
    results = world.call_and_check([replace(given, topk_idx=given.topk_idx.to(dtype)) for given in inputs])
    assert testing.same_bits(results[0].y, world.call(inputs)[0].y)


def test_ids_out_of_range_act_as_minus_one(worlds):
    """6: also those that an int32 would wrap into range."""
    world = worlds("main-2")
    inputs = world.inputs([6, 4])
    inputs[0].topk_idx[0, 1] = 16
    inputs[0].topk_idx[1, 0] = 2**32 + 3
    inputs[1].topk_idx[2, 3] = -(2**31)
    world.call_and_check(inputs)
    for given in inputs:
        wild = (given.topk_idx < 0) | (given.topk_idx > 15)
        given.topk_idx.masked_fill_(wild, -1)
    world.call_and_check(inputs)


def test_checked_mode_names_token_and_slot(worlds):
    """6: with check=True an id out of range raises before anything is launched."""
    world = worlds("main-1")
    inputs = world.inputs([6])[0]
    inputs.topk_idx[4, 2] = 16

    def body(rank):
        x, idx, weights, _ = rank.put(inputs)
        with pytest.raises(ValueError, match=r"(?s)16.*token 4.*slot 2|token 4.*slot 2.*16"):
            deep_moe.stage(rank.buffer, x, idx, weights, check=True)

    world.run(body)
    world.call_and_check(world.inputs([6]))


def test_statistics_accumulate_over_calls(worlds):
    """7: exact sums over several calls with -1 and duplicates, never reset."""
    world = worlds("main-2")
    routing = world.routing
    some = [routing.with_holes, routing.duplicates, routing.nobody, routing.random]
    batches = [world.inputs([11, 29], pattern, seed=i) for i, pattern in enumerate(some)]

    def body(rank):
        stats = rank.new_stats().fill_(1000)
        for batch in batches:
            given = batch[rank.group.rank()]
            rank.stage(rank.put(given))
            rank.mega(rank.new_y(given), stats)
        rank.synchronize()
        return stats.cpu()

    world.poison()
    total = 1000 + sum(world.expected_stats(batch) for batch in batches)
    assert torch.equal(torch.stack(world.run(body)), total.int())


def test_statistics_are_optional(worlds):
    world = worlds("small")
    inputs = world.inputs([5, 5])

    def body(rank):
        given = inputs[rank.group.rank()]
        y = rank.new_y(given)
        rank.stage(rank.put(given))
        rank.mega(y)
        rank.synchronize()
        return y.cpu()

    for given, y in zip(inputs, world.run(body), strict=True):
        testing.assert_close(world.problem, y, world.expected(given))
