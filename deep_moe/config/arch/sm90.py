"""Hopper: which tile a token bound gets, and how large the ring of row blocks is.

Everything here is a function of values that are equal on all ranks (the problem and the number of ranks), never of a
rank's token count.
"""

from ... import _C

# Expected rows of an expert up to which 64-row tiles are taken: a second block would read the weights twice anyway.
SMALL_ROWS = 64
# How far L2 runs behind L1, in row blocks: enough L1 work in front of the scatter that the dispatch pull, which shares
# the NVLink egress with it, is over its peak.
LAG_BLOCKS = {64: 48, 128: 24}
UNIT_BLOCKS = 8
RING_ALIGNMENT = 128  # rows; every block_m divides it


def bound_classes(num_experts: int, num_topk: int, max_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Ascending token bounds per rank; a `num_tokens_bound` belongs to the first class that is not below it."""
    small = SMALL_ROWS * num_experts // (num_ranks * num_topk)
    return (small, max_tokens) if 1 <= small < max_tokens else (max_tokens,)


def block_m_of(bound: int, num_experts: int, num_topk: int, num_ranks: int) -> int:
    """Rows of a tile for the class with this bound: 64 while an expert expects at most 64 rows."""
    return 64 if bound * num_ranks * num_topk <= SMALL_ROWS * num_experts else 128


def variant_configs(geometry: "_C.Config") -> list["_C.Config"]:
    """One configuration per bound class. `geometry` has every field set but ring_rows and the variant fields."""
    shape = (geometry.num_experts, geometry.num_topk)
    bounds = bound_classes(*shape, geometry.max_tokens_per_rank, geometry.num_ranks)
    variants = []
    for index, bound in enumerate(bounds):
        block_m = block_m_of(bound, *shape, geometry.num_ranks)
        most = geometry.max_blocks_of(block_m)
        variants.append(
            geometry.replace(
                bound_class=index,
                block_m=block_m,
                lag_blocks=min(LAG_BLOCKS[block_m], most),
                unit_blocks=min(UNIT_BLOCKS, most),
            )
        )
    ring_rows = max(_rows_needed(variant) for variant in variants)
    return [variant.replace(ring_rows=ring_rows) for variant in variants]


def _rows_needed(variant: "_C.Config") -> int:
    """Rows that hold the lag and the unit, or the whole pool when that is smaller."""
    blocks = min(variant.lag_blocks + variant.unit_blocks, variant.max_blocks_of(variant.block_m))
    return -(-blocks * variant.block_m // RING_ALIGNMENT) * RING_ALIGNMENT
