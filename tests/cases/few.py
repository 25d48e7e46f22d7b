"""Few tokens: tiles of 8 rows, whose operands are swapped, and one rank alone, which routes in every CTA."""

from dataclasses import replace

import pytest
import torch

from cases.order import check_layers, run_layers
from deep_moe import testing

LONE_ENTRIES = 256  # kMaxLoneEntries


def rows_to_expert(world, rows: int, expert: int) -> list[testing.RankInputs]:
    """Exactly so many rows for one expert, from as few tokens of all ranks: both slots of most name it."""
    topk, ranks = world.problem.num_topk, world.num_ranks
    slots = [(rows + rank) // ranks for rank in range(ranks)]
    inputs = world.inputs([-(-n // topk) for n in slots], world.routing.to_expert(expert), seed=rows)
    for given, n in zip(inputs, slots, strict=True):
        given.topk_idx.view(-1)[n:] = -1
    assert world.expected_stats(inputs).flatten()[expert] == world.expected_stats(inputs).sum() == rows
    return inputs


def check_bits_of_all_heights(world, inputs) -> None:
    """The 8-row tiles are right, and the others give their bits."""
    ours = world.call_and_check(inputs, bound=world.bound_of(8))
    for block_m in (64, 128):
        for one, other in zip(ours, world.call(inputs, bound=world.bound_of(block_m)), strict=True):
            assert testing.same_bits(one.y, other.y) and testing.same_bits(one.stats, other.stats), block_m


@pytest.mark.parametrize("clamp", [None, 0.3], ids=str)
@pytest.mark.parametrize("name", ["ring", "long-k", "lone"])
def test_same_bits_at_every_tile_height(worlds, name, clamp):
    """Hidden 320 and 576, intermediate 128, 144 and 528; a stage of L2 holds 1, 2, 4 or (its second) 1 K blocks."""
    world = worlds(name, clamp=clamp)
    most = [world.bound_of(8)] * world.num_ranks
    for pattern in (world.routing.random, world.routing.duplicates, world.routing.with_holes):
        check_bits_of_all_heights(world, world.inputs(most, pattern))


@pytest.mark.parametrize("rows", [7, 8, 9, 16, 17])
def test_blocks_of_one_expert(worlds, rows):
    """A row less and more than one and two blocks; both slots of a token name the expert."""
    check_bits_of_all_heights(worlds("long-k"), rows_to_expert(worlds("long-k"), rows, expert=2))


def test_same_bits_on_a_ring_that_wraps(worlds, seed):
    """Up to 32 blocks and more on a ring of 16. Launches whose blocks all have slots announce no L2 tile: between those
    that wrap, they must leave no count behind."""
    world, other = worlds("wrap-8"), worlds("wrap-64")
    routing = world.routing
    layers = [
        world.inputs(counts, pattern, seed=i)
        for i, (counts, pattern) in enumerate(
            [
                ([64, 64], routing.to_rank(1)),  # 32 blocks or more on one rank, none on the other
                ([20, 9], routing.random),
                ([64, 50], routing.duplicates),
                ([32, 32], routing.to_expert(3)),  # 16 blocks: no slot is used twice
                ([33, 32], routing.to_expert(3)),  # one is
                ([64, 64], routing.to_rank(0)),
            ]
        )
    ]
    ours, theirs = (run_layers(each, layers, seed) for each in (world, other))
    check_layers(world, layers, ours)
    for rank, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert all(map(testing.same_bits, one, two)), f"rank {rank}"


@pytest.mark.parametrize("name", ["small", "lone"])
def test_tile_heights_in_turns_on_one_buffer(worlds, name, seed):
    """A launch clears the block counters that the one before has used, which had another number of blocks; every
    order of three heights occurs."""
    world = worlds(name)
    heights = [8, 8, 64, 8, 128, 8, 64, 64, 8, 128, 64, 128, 128, 8, 8]
    bounds = [world.bound_of(block_m) for block_m in heights]
    counts = [min(bounds[i], 16 if block_m == 8 else 40 + i) for i, block_m in enumerate(heights)]
    routing = world.routing
    patterns = [routing.to_expert(1), routing.random, routing.to_expert(0)]
    layers = [world.inputs([count] * world.num_ranks, patterns[i % 3], seed=i) for i, count in enumerate(counts)]
    check_layers(world, layers, run_layers(world, layers, seed, bounds=bounds))


# ---- one rank alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [0, 1, 31, 33, LONE_ENTRIES - 1, LONE_ENTRIES, LONE_ENTRIES + 1])
def test_a_lone_rank_around_the_most_entries(worlds, entries):
    """Received rows are counted either way; of all entries, those of the largest call have the same bits."""
    world = worlds("lone", num_sms=3)
    whole = world.inputs([300])[0]
    given = testing.RankInputs(whole.x[:entries], whole.topk_idx[:entries], whole.topk_weights[:entries])
    result = world.call_and_check([given])[0]
    assert testing.same_bits(result.y, world.call([whole])[0].y[:entries])


@pytest.mark.parametrize("pattern", ["random", "duplicates", "with_holes", "crowded", "nobody"])
@pytest.mark.parametrize("name", ["lone", "main-1", "direct"])
def test_rows_that_are_not_pulled_have_the_bits_of_those_that_are(worlds, name, pattern):
    """Up to four tokens and 32 entries. Crowded: all but the first token on one expert, up to three blocks with others
    behind them."""
    world = worlds(name, num_sms=3)
    if pattern == "duplicates" and world.problem.num_topk == 1:
        pytest.skip("one slot")
    whole = world.inputs([6], getattr(world.routing, "random" if pattern == "crowded" else pattern))[0]
    if pattern == "crowded":
        whole.topk_idx[1:] = 2
    pulled = world.call_and_check([whole], bound=world.problem.max_tokens_per_rank)[0]
    for count in range(1, min(5, world.bound_of(8)) + 1):
        given = testing.RankInputs(whole.x[:count], whole.topk_idx[:count], whole.topk_weights[:count])
        result = world.call_and_check([given], bound=count)[0]
        assert testing.same_bits(result.y, pulled.y[:count]), count


@pytest.mark.parametrize("name", ["lone", "direct"])
def test_rows_pulled_and_not_pulled_in_turns(worlds, name, seed):
    """Flags, counters and their banks go on, and what stays in shared memory and the pools is not mistaken for rows."""
    world = worlds(name, num_sms=3)
    counts = [4, 3, 16, 2, 5, 0, 1, 4, 4, 6, 3]
    patterns = [world.routing.random, world.routing.with_holes, world.routing.to_expert(1)]
    layers = [world.inputs([count], patterns[i % 3], seed=i) for i, count in enumerate(counts)]
    bounds = [world.bound_of(8)] * len(counts)
    check_layers(world, layers, run_layers(world, layers, seed, bounds=bounds))


@pytest.mark.parametrize("bound", [16, None])
def test_a_lone_rank_with_ids_out_of_range(worlds, bound):
    """They are holes, also the first and the last entry, and a rank with nothing else."""
    world = worlds("lone", num_sms=3)
    given = world.inputs([16])[0]
    given.topk_idx[[0, 3, 15], 0] = torch.tensor([-1, 4, 2**31 - 1])
    result = world.call_and_check([given], bound=bound)[0]
    assert (result.y[[0, 3, 15]] == 0).all()
    assert (world.call_and_check(world.inputs([5], world.routing.nobody), bound=bound)[0].y == 0).all()


@pytest.mark.parametrize("counts, bound", [((300, 40, 0, 300, 9), None), ((4, 16, 0, 3, 5, 4), 16)])
def test_a_lone_rank_adds_up_its_statistics(worlds, counts, bound):
    world = worlds("lone", num_sms=3)
    batches = [world.inputs([count], world.routing.with_holes, seed=count)[0] for count in counts]

    def body(rank):
        stats = rank.new_stats().fill_(7)
        for given in batches:
            rank.stage(rank.put(given))
            rank.mega(rank.new_y(given), stats, bound)
        rank.synchronize()
        return stats.cpu()

    total = 7 + sum(world.expected_stats([given]) for given in batches)
    assert torch.equal(world.run(body)[0], total[0].int())


@pytest.mark.parametrize("num_sms", [1, 3])
def test_a_lone_rank_in_turns_with_and_without_count_flags(worlds, num_sms, seed):
    """Flags, epochs and the banks of counters go on where a launch does not use them."""
    world = worlds("lone", num_sms=num_sms)
    counts = [256, 257, 300, 0, 3, 300, 1, 258, 256, 256, 299]
    patterns = [world.routing.random, world.routing.to_expert(2), world.routing.with_holes]
    layers = [world.inputs([count], patterns[i % 3], seed=i) for i, count in enumerate(counts)]
    check_layers(world, layers, run_layers(world, layers, seed))


def test_a_count_on_the_device_decides_whether_a_rank_routes_alone(worlds):
    """Not the rows of the graph batch, of which the others are stale entries."""
    world = worlds("main-1")
    given = world.inputs([70])[0]  # 280 entries
    whole = world.call_and_check([given])[0]
    for count in (64, 65):  # 256 and 260
        result = world.call_and_check([replace(given, count=count)])[0]
        assert testing.same_bits(result.y[:count], whole.y[:count])


def test_a_count_on_the_device_decides_whether_rows_are_pulled(worlds):
    world = worlds("lone")
    given = world.inputs([9])[0]
    whole = world.call_and_check([given], bound=16)[0]
    for count in (4, 5):
        result = world.call_and_check([replace(given, count=count)], bound=16)[0]
        assert testing.same_bits(result.y[:count], whole.y[:count])
