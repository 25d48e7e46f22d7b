"""CASES "Time and order" that need no recovery: 15 (a late rank), 16 (back to back, ring wrap)."""

import contextlib
import time

import pytest
import torch
from geometries import GEOMETRIES

import deep_moe
from deep_moe import testing


def run_layers(world, layers, seed=0, between=None, bounds=None) -> list[list[torch.Tensor]]:
    """Several layers on one buffer without a host sync in between: y per rank and layer. bounds: one per layer."""

    def body(rank):
        me = rank.group.rank()
        prepared = [(rank.put(inputs[me]), rank.new_y(inputs[me])) for inputs in layers]
        for step, (put, y) in enumerate(prepared):
            if between:
                between(rank, step)
            rank.stage(put)
            rank.mega(y, bound=bounds[step] if bounds else None)
        rank.synchronize()
        return [y.cpu() for _, y in prepared]

    world.poison()
    return world.run(body, seed=seed)


def check_layers(world, layers, seen) -> None:
    for step, inputs in enumerate(layers):
        for rank, given in enumerate(inputs):
            testing.assert_close(world.problem, seen[rank][step], world.expected(given), f"layer {step}, rank {rank}")


@pytest.mark.parametrize("name", ["main-2", "main-4", "main-8"])
def test_layers_back_to_back(worlds, name, seed):
    """16: five layers with different counts and routings, and no rank waits on the host."""
    world = worlds(name)
    patterns = [world.routing.random, world.routing.to_rank(0), world.routing.nobody, world.routing.duplicates,
                world.routing.to_expert(world.problem.num_experts - 1)]  # fmt: skip
    layers = [
        world.inputs([(5 * rank + 11 * i) % 32 for rank in range(world.num_ranks)], pattern, seed=i)
        for i, pattern in enumerate(patterns)
    ]
    check_layers(world, layers, run_layers(world, layers, seed))


def test_one_layer_feeds_the_next(worlds):
    """16: y of a layer is x of the next, on the stream, with two sets of weights on one buffer."""
    first, second = worlds("main-2"), worlds("main-2", weights_seed=1)
    inputs = first.inputs([9, 17])

    def body(rank):
        me = rank.group.rank()
        other = second.ranks[me]
        x, idx, weights, count = rank.put(inputs[me])
        y, z = rank.new_y(inputs[me]), rank.new_y(inputs[me])
        rank.stage((x, idx, weights, count))
        rank.mega(y)
        rank.stage((y, idx, weights, count))
        rank.l1, rank.l2, other.l1, other.l2 = other.l1, other.l2, rank.l1, rank.l2
        try:
            rank.mega(z)
        finally:
            rank.l1, rank.l2, other.l1, other.l2 = other.l1, other.l2, rank.l1, rank.l2
        rank.synchronize()
        return y.cpu(), z.cpu()

    for given, (y, z) in zip(inputs, first.run(body), strict=True):
        testing.assert_close(first.problem, y, first.expected(given), "first layer")
        given = testing.RankInputs(y, given.topk_idx, given.topk_weights)
        testing.assert_close(second.problem, z, second.expected(given), "second layer")


@pytest.mark.parametrize("counts", [[256, 256], [256, 1], [0, 256]], ids=str)
def test_more_row_blocks_than_the_ring_holds(worlds, counts, seed):
    """16: 1024 rows through a ring of 512, random and all for one expert."""
    world = worlds("ring")
    world.call_and_check(world.inputs(counts, seed=seed), seed=seed)
    world.call_and_check(world.inputs(counts, world.routing.to_expert(2)), seed=seed)
    world.call_and_check(world.inputs(counts, world.routing.to_expert(0)), bound=None, seed=seed)


def test_tiles_of_more_k_blocks_than_stages(worlds, seed):
    """Tiles are announced in mid-tile, last blocks are full or half.

    The bits are those of the 64-row kernel, which halves nothing.
    """
    world = worlds("long-k")
    for inputs in (
        world.inputs([57, 33], seed=seed),
        world.inputs([57, 57], world.routing.to_expert(1), seed=seed),
        world.inputs([0, 1], seed=seed),
    ):
        tall, small = (
            world.run(lambda rank, bound=bound, inputs=inputs: rank.call(inputs[rank.group.rank()], bound), seed=seed)
            for bound in (None, world.bound_of(64))
        )
        for ours, theirs in zip(tall, small, strict=True):
            assert testing.same_bits(ours.y, theirs.y) and testing.same_bits(ours.stats, theirs.stats)


def test_ring_wraps_over_several_layers(worlds):
    world = worlds("ring")
    layers = [world.inputs([256, 100 * i], world.routing.duplicates, seed=i) for i in range(3)]
    check_layers(world, layers, run_layers(world, layers))


@pytest.mark.parametrize("when", ["first launch", "between calls"])
def test_a_rank_late_by_seconds(worlds, when):
    """15: the others wait; nothing times out."""
    world = worlds("main-2")
    late_step = 0 if when == "first launch" else 1
    layers = [world.inputs([8, 8], seed=i) for i in range(3)]

    def between(rank, step):
        if rank.group.rank() == 1 and step == late_step:
            rank.synchronize()
            time.sleep(2)

    check_layers(world, layers, run_layers(world, layers, between=between))


# ---- a launch that gives up: orderly, on all ranks, with the context alive -------------------------------------------


def outcomes_of(world, inputs, launch, **options) -> list[str]:
    """launch(rank, y) on all ranks, after which the buffer may be unusable; the world is closed.

    Every rank's message, "" for none. `options` are those of World.run.
    """

    def body(rank):
        given = inputs[rank.group.rank()]
        y = rank.new_y(given)
        try:
            rank.stage(rank.put(given))
            launch(rank, y)
            rank.synchronize()
            rank.buffer.check_usable()
        except deep_moe.DeepMoeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    messages = world.run(body, **options)
    with contextlib.suppress(deep_moe.DeepMoeError):  # said once more on a rank that has not heard of it
        world.close()
    return messages


def failed_launches(device, launch) -> list[str]:
    """The outcomes in a small world of its own, and the context lives."""
    world = testing.World(GEOMETRIES["small"].problem(), 2, device)
    messages = outcomes_of(world, world.inputs([5, 9]), launch)
    assert torch.ones(4, device=device).sum() == 4  # the context lives
    return messages


def test_bounds_of_different_classes_are_an_error_on_all_ranks(device):
    """The class travels with the counts; a difference is a MismatchError everywhere, not a hang."""
    bounds = GEOMETRIES["small"].problem().bound_classes(2)[-2:]
    for message in failed_launches(device, lambda rank, y: rank.mega(y, bound=bounds[rank.group.rank()])):
        assert message.startswith("MismatchError") and "num_tokens_bound" in message


def test_a_rank_that_never_launches_ends_the_others(device, monkeypatch):
    """The waiting rank times out with a message that says for whom it waited."""
    monkeypatch.setenv("DEEP_MOE_TIMEOUT", "2")

    def launch(rank, y):
        if rank.group.rank() == 0:
            rank.mega(y)

    waiting, _ = failed_launches(device, launch)
    assert waiting.startswith("PeerTimeout") and "rank 1" in waiting
