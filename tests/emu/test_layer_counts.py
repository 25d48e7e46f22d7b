"""What a launch does, counted by the emulator, against what the schedule says."""

import pytest
from geometries import GEOMETRIES


def blocks_of(rows: list[int], block_m: int) -> list[int]:
    """Rows of each row block of one rank: an expert's last block may be partly filled."""
    return [min(block_m, n - first) for n in rows for first in range(0, n, block_m)]


@pytest.mark.parametrize(
    "name, bound", [("main-2", 64), ("main-2", None), ("small", 57), ("small", None), ("768x1152", None)]
)
def test_instructions_and_copies_of_a_launch(worlds, name, bound):
    """Every row is copied once, every block meets every weight tile once, and nothing is done for empty experts."""
    world = worlds(name)
    problem = world.problem
    limit = min(bound or 64, problem.max_tokens_per_rank)
    inputs = world.inputs([limit, limit // 2], world.routing.with_holes)
    rows = world.expected_stats(inputs).tolist()
    bounds = problem.bound_classes(GEOMETRIES[name].ranks)
    variant = next(i for i, most in enumerate(bounds) if (bound or bounds[-1]) <= most)
    config = problem.configs(GEOMETRIES[name].ranks)[variant]

    def body(rank):
        rank.call(inputs[rank.group.rank()], bound)
        return rank.buffer._backend.counts  # of the last launch

    for rank, counts in enumerate(world.run(body)):
        blocks = blocks_of(rows[rank], config.block_m)
        l1 = -(-2 * problem.intermediate // 256) * -(-problem.hidden // 128)
        l2 = -(-problem.hidden // 256) * -(-problem.intermediate // 128)
        stages = len(blocks) * (l1 + l2)  # steps of 128 of K
        wgmma_rows = sum(-(-n // 64) * 64 for n in blocks)  # a block of at most 64 rows costs half
        assert counts["macs"] == wgmma_rows * (l1 + l2) * 256 * 128
        assert counts["wgmma"] == counts["macs"] // (64 * 128 * 32)
        box_rows = 8 if config.block_m == 64 else 64  # in which a block is loaded that is at most half full
        loads = sum(-(-n // box_rows) if n <= config.block_m // 2 else 1 for n in blocks)  # of activations
        assert counts["tma_loads"] == loads * (l1 + l2)
        tiles = len(blocks) * -(-2 * problem.intermediate // 256) + len(blocks) * -(-problem.hidden // 256)
        # Weights and activation scales of every stage, weight scales of every tile; pulled rows.
        assert counts["bulk_loads"] == 2 * stages + tiles + sum(rows[rank])
        assert counts["bulk_stores"] == sum(rows[rank])
