"""CASES "Shapes": 8 and 9."""

import pytest
import torch

from deep_moe import testing

ODD = ["768x1152", "8192x192", "64x2304", "2880x1408", "896-experts"]


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes(worlds, name):
    """8: hidden 768, 8192, 2880 and 64; intermediate 1152, 192, 2304, 1408 and 80; top-k 1 and 16; one expert per rank;
    896 experts."""
    world = worlds(name)
    counts = [world.problem.max_tokens_per_rank, 3][: world.num_ranks]
    world.call_and_check(world.inputs(counts, world.routing.with_holes))
    world.call_and_check(world.inputs(counts[::-1]))


def test_every_slot_of_sixteen_goes_to_one_expert(worlds):
    """8: top-k 16, all duplicates, 896 experts of which 895 stay empty."""
    world = worlds("896-experts")
    world.call_and_check(world.inputs([4, 3], world.routing.to_expert(895)))


def test_rows_beyond_two_gibibytes(worlds):
    """9: y and x with so wide a row stride that row 2 starts beyond 2^32 bytes. Only touched pages exist."""
    world = worlds("small")
    inputs = world.inputs([4, 4])
    plain = world.call_and_check(inputs)
    hidden, stride = world.problem.hidden, (1 << 30) + 64

    def prepare(rank):
        """Apart from the launches: an allocator that has to return memory waits for the other rank's kernel."""
        given = inputs[rank.group.rank()]
        x, *routing = rank.put(given)
        if rank.group.rank() == 0:
            far = torch.empty(3 * stride + hidden, dtype=torch.bfloat16, device=rank.device)
            x = far.as_strided((4, hidden), (stride, 1)).copy_(x)
        y = x if rank.group.rank() == 0 else rank.new_y(given)
        rank.synchronize()
        return (x, *routing), y

    prepared = world.run(prepare)

    def body(rank):
        put, y = prepared[rank.group.rank()]
        rank.stage(put)
        rank.mega(y)
        rank.synchronize()
        return y.cpu()

    for y, expected in zip(world.run(body), plain, strict=True):
        assert testing.same_bits(y, expected.y)
