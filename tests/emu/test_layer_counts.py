"""What a launch does, counted by the emulator, against what the schedule says."""

import pytest
from geometries import GEOMETRIES


def blocks_of(rows: list[int], block_m: int) -> list[int]:
    """Rows of each row block of one rank: an expert's last block may be partly filled."""
    return [min(block_m, n - first) for n in rows for first in range(0, n, block_m)]


@pytest.mark.parametrize(
    "name, bound",
    [("main-2", 4), ("main-2", 64), ("main-2", None), ("small", 16), ("small", 57), ("small", None)]
    + [("long-k", 8), ("768x1152", None)],
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
        mxfp4, few = problem.mma_type == "fp8xmxfp4", config.block_m == 8
        # L2 tiles of 8 rows are 64 FP8 weight rows wide, and a stage holds 4 K blocks of them.
        l2_rows, stage_blocks = (64, 4) if few and not mxfp4 else (256, 1)
        l1_tiles, l1_k = -(-2 * problem.intermediate // 256), -(-problem.hidden // 128)
        l2_tiles, l2_k = -(-problem.hidden // l2_rows), -(-problem.intermediate // 128)
        steps = l1_tiles * l1_k + l2_tiles * l2_k  # of 128 of K, of the tiles of a block
        # A block of at most 64 rows costs half of one of 128. N of a wgmma are weights, or with swapped operands rows.
        step_rows, n = (config.block_m, config.block_m) if config.swaps_operands else (64, 128)
        wgmma_rows = sum(-(-size // step_rows) * step_rows for size in blocks)
        assert counts["macs"] == wgmma_rows * (l1_tiles * l1_k * 256 + l2_tiles * l2_k * l2_rows) * 128
        assert counts["wgmma"] == counts["macs"] // (64 * n * 32)
        box_rows = 64 if config.block_m == 128 else 8  # in which a block is loaded that is at most half full
        loads = sum(-(-n // box_rows) if n <= config.block_m // 2 else 1 for n in blocks)  # of activations
        stages = l1_tiles * l1_k + l2_tiles * -(-l2_k // stage_blocks)
        assert counts["tma_loads"] == loads * stages
        # Weights of every K block, activation scales of every stage, weight scales of every tile; pulled rows.
        assert counts["bulk_loads"] == len(blocks) * (steps + stages + l1_tiles + l2_tiles) + sum(rows[rank])
        assert counts["bulk_stores"] == sum(rows[rank])
