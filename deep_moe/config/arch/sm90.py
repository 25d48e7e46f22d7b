"""Hopper: candidates for tile and order, the cost model that chooses among them, and the size of the ring.

Everything here is a function of values that are equal on all ranks (the problem and the number of ranks), never of a
rank's token count or of its GPU. `Problem(overrides=...)` forces single fields, `bench/sweep.py` times many at once.
"""

from bisect import bisect_left
from collections.abc import Mapping
from math import ceil, sqrt
from statistics import NormalDist
from typing import NamedTuple

from ... import _C

FP8, MXFP4 = _C.MmaType.Fp8xFp8, _C.MmaType.Fp8xMxfp4


class Candidate(NamedTuple):
    """Tile and order of a variant; fields of `_C.Config`."""

    block_m: int
    lag_blocks: int
    unit_blocks: int
    decode_ahead: bool = False


# From the smallest tile up. The order is from measurements, the score does not see it: L2 lags so far behind L1 that
# the dispatch pull, which shares the NVLink egress with the scatter, is over its peak.
CANDIDATES = {
    FP8: (Candidate(64, lag_blocks=48, unit_blocks=8), Candidate(128, lag_blocks=24, unit_blocks=8)),
    MXFP4: (
        *(Candidate(rows, lag_blocks=48, unit_blocks=8) for rows in (8, 16, 24, 32, 64)),
        Candidate(128, lag_blocks=24, unit_blocks=8),
        Candidate(128, lag_blocks=24, unit_blocks=16, decode_ahead=True),
    ),
}
# With swapped operands, for up to FEW_PAIRS pairs of token and slot per rank. Measured: at 6 and 12 pairs 3 to 8 %
# faster than 64-row tiles (H 7168, I 2048: level), from 24 on within 2 %.
SWAPPED = Candidate(8, lag_blocks=48, unit_blocks=8)
FEW_PAIRS = 16
# Units in the ring besides the lag. One is what the order needs; with two more the rows of a unit are pulled while the
# last tiles of the blocks before them still run (1 to 2 % from 1024 tokens on).
RING_UNITS = 3
RING_ALIGNMENT = 128  # rows; of 24-row blocks the ring holds as many as fit

# Measured on one H200, promoted every 128 of K, times in µs.
NUM_SMS = 132
EMPTY_US = 8.4  # a launch without tokens
START_US = 20.0  # with tokens: until all SMs multiply
# One K block of a tile, by block_m, when the tensor cores, or with MXFP4 instructions, are the limit.
K_BLOCK_US = {FP8: {8: 0.33, 64: 0.62, 128: 0.80}, MXFP4: {8: 0.42, 16: 0.47, 24: 0.53, 32: 0.57, 64: 0.80, 128: 1.07}}
HALF_TILE = 64  # rows; a last block that is not larger costs half in a 128-row kernel:
HALF_K_BLOCK_US = 0.52
TILE_US = 1.0  # what a tile costs besides its K blocks
READ_GBS = 4550.0
# What a layer makes of it: a fit, best at few tokens, where it decides.
READ_PART = {8: 0.98, 16: 0.98, 24: 0.98, 32: 0.98, 64: 0.98, 128: 0.92}
COMBINE_GBS = 3900.0

# A class of bounds ends so many standard deviations of an expert's rows below a whole number of smallest tiles.
# Measured: 64- and 128-row tiles take the same time at 320 tokens of H 4096, I 2048, top-6 on 32 experts (60 rows
# expected), 210 of H 7168, I 2048, top-8 on 32 (52) and 430 of H 7168, I 3072, top-6 on 48 (54); at 64 rows, 128-row
# tiles are 1 to 7 % faster. MXFP4: each class is the fastest on both sides of its bounds, but for 1 % at 32 tokens and
# 4 % at 160 of H 4096, and for what OWN_DECODING_ROWS says.
ROWS_MARGIN = 1.25
# MXFP4: up to so many rows of an expert, every tile decodes its weights. Measured: the other way is 20 % slower at 384
# rows of H 4096, I 2048, and 9 % faster at 768; with H 7168, I 3072 29 % slower at 256 rows, 4 % faster at 512 and
# 16 % at 1024.
OWN_DECODING_ROWS = 512
# Of 64 KB (include/deep_moe/sched/decode_plan.h): 16 for each of two tiles of 32 decoders.
DECODED_SLOTS = 1024
NOISE = 0.02  # scores that are closer than this tell nothing
SPREAD = NormalDist().quantiles(n=16)  # rows of an expert: so many standard deviations around their mean


def expected_us(config: "_C.Config", num_tokens: int) -> float:
    """Score of a configuration: µs of a call with `num_tokens` tokens on every rank and uniform routing.

    A start; then the weights are read while tiles are multiplied, and the longer of the two counts; half a tile until
    the last SM is done; the combine. NVLink is left out, as all candidates send the same. Within 15 % of the times in
    tests/unit/test_problem.py.
    """
    if num_tokens == 0:
        return EMPTY_US
    hits = min(1.0, config.num_topk / config.num_experts)  # the part of all tokens that goes to one expert
    touched = config.experts_per_rank * (1 - (1 - hits) ** (num_tokens * config.num_ranks))
    rows = _rows_of_expert(config, num_tokens)
    deviation = sqrt(rows * (1 - hits))
    multiply = sum(_expert_us(config, max(1.0, rows + at * deviation)) for at in SPREAD) / len(SPREAD)
    read = _weight_bytes(config) / (READ_GBS * READ_PART[config.block_m]) / 1e3
    combine = num_tokens * (2 * config.num_topk + 2) * config.hidden / COMBINE_GBS / 1e3
    tiles = config.l1_n_tiles + config.l2_n_tiles
    tail = _tiles_us(config, K_BLOCK_US[config.mma_type][config.block_m]) / tiles / 2
    return START_US + touched * max(read, multiply / NUM_SMS) + tail + combine


def best_candidate(geometry: "_C.Config", num_tokens: int, forced: Mapping[str, int] | None = None) -> Candidate:
    """The smallest score at `num_tokens` tokens per rank, of the candidates with the `block_m` and `decode_ahead` that
    are in `forced`.

    Where scores are too close: the smallest tile that holds the rows an expert expects, or else the largest. MXFP4: not
    by score, but the smallest tile that holds most experts' rows (`_most_rows`), or else the largest.
    """
    candidates, forced = _candidates(geometry), forced or {}
    if forced.get("block_m") == SWAPPED.block_m:
        return SWAPPED
    allowed = [
        each
        for each in candidates
        if forced.get("block_m") in (None, each.block_m) and forced.get("decode_ahead") in (None, each.decode_ahead)
    ] or candidates
    if geometry.mma_type == MXFP4:
        return next((each for each in allowed if num_tokens <= _tokens_within(geometry, _most_rows(each))), allowed[-1])
    scores = [expected_us(geometry.replace(**candidate._asdict()), num_tokens) for candidate in allowed]
    close = [each for each, score in zip(allowed, scores, strict=True) if score <= min(scores) * (1 + NOISE)]
    rows = _rows_of_expert(geometry, num_tokens)
    return next((candidate for candidate in close if rows <= candidate.block_m), close[-1])


def bound_classes(geometry: "_C.Config") -> tuple[int, ...]:
    """Ascending token bounds per rank; a `num_tokens_bound` belongs to the first class that is not below it.

    FP8: at most three. The first has swapped operands. Then the candidate of the largest bound serves all bounds from
    which on it is the best; the class before it ends where the rows of most experts still fit a whole number of
    smallest tiles (ROWS_MARGIN), as more tokens begin tiles that are read but hardly filled. MXFP4: one for each
    candidate.
    """
    most = geometry.max_tokens_per_rank
    candidates = _candidates(geometry)
    if geometry.mma_type == MXFP4:
        bounds = {_tokens_within(geometry, _most_rows(candidate)) for candidate in candidates[:-1]}
    else:
        few, last, smallest = _few_tokens(geometry), best_candidate(geometry, most), candidates[0].block_m
        tiles = range(ceil(_rows_of_expert(geometry, most) / smallest))
        ends = bisect_left(
            tiles,
            True,
            lo=1,
            key=lambda count: best_candidate(geometry, _tokens_within(geometry, count * smallest)) == last,
        )
        bounds = {few, max(few, _tokens_within(geometry, (ends - 1) * smallest))}
    return (*sorted(bound for bound in bounds if 0 < bound < most), most)


def variant_configs(geometry: "_C.Config", overrides: Mapping[str, int]) -> list["_C.Config"]:
    """One configuration per bound class. `geometry` has every field set but ring_rows and the variant fields.

    `overrides` are fields to force; what follows from them (the order that goes with a tile, the ring) follows.
    """
    variants = []
    for index, bound in enumerate(bound_classes(geometry)):
        is_few = geometry.mma_type == FP8 and bound <= _few_tokens(geometry)
        chosen = best_candidate(geometry, bound, {"block_m": SWAPPED.block_m} | overrides if is_few else overrides)
        most = geometry.max_blocks_of(chosen.block_m)
        fields = dict(
            block_m=chosen.block_m,
            lag_blocks=min(chosen.lag_blocks, most),
            unit_blocks=min(chosen.unit_blocks, most),
            decode_ahead=chosen.decode_ahead,
        )
        variants.append(geometry.replace(bound_class=index, **{**fields, **overrides}))
    ring_rows = overrides.get("ring_rows") or max(_ring_rows(variant) for variant in variants)
    decoded_slots = overrides.get("decoded_slots") or max(_decoded_slots(variant) for variant in variants)
    return [variant.replace(ring_rows=ring_rows, decoded_slots=decoded_slots) for variant in variants]


def _candidates(geometry: "_C.Config") -> tuple[Candidate, ...]:
    """With biases, kernels that decode to shared memory have too few registers."""
    candidates = CANDIDATES[geometry.mma_type]
    if geometry.mma_type == MXFP4 and geometry.bias:
        return tuple(each for each in candidates if each.block_m < _C.kDecodedBlockM)
    return candidates


def _most_rows(candidate: Candidate) -> int:
    """Of an expert, for an MXFP4 candidate."""
    return OWN_DECODING_ROWS if candidate.block_m == _C.kDecodedBlockM else candidate.block_m


def _tokens_within(geometry: "_C.Config", most_rows: int) -> int:
    """The most tokens per rank whose rows of an expert, with ROWS_MARGIN, are no more than these."""
    hits = min(1.0, geometry.num_topk / geometry.num_experts)
    margin = ROWS_MARGIN * sqrt(1 - hits)
    rows = ((sqrt(margin**2 + 4 * most_rows) - margin) / 2) ** 2
    return int(rows * geometry.num_experts / (geometry.num_ranks * geometry.num_topk) + 1e-9)


def _ring_rows(variant: "_C.Config") -> int:
    """Rows that hold the lag and some units, or the whole pool when that is smaller."""
    blocks = min(variant.lag_blocks + RING_UNITS * variant.unit_blocks, variant.max_blocks_of(variant.block_m))
    return -(-blocks * variant.block_m // RING_ALIGNMENT) * RING_ALIGNMENT


def _decoded_slots(variant: "_C.Config") -> int:
    """DECODED_SLOTS, or for small layers as many as hold all weights."""
    if not variant.decodes_ahead:
        return 0
    chunks = variant.experts_per_rank * ceil(_k_blocks(variant) / _C.kChunkBlocks)
    return min(DECODED_SLOTS, max(_C.kMinDecodedSlots, chunks))


def _few_tokens(geometry: "_C.Config") -> int:
    return max(1, FEW_PAIRS // geometry.num_topk)


def _rows_of_expert(config: "_C.Config", num_tokens: int) -> float:
    return num_tokens * config.num_ranks * config.num_topk / config.num_experts


def _expert_us(config: "_C.Config", rows: float) -> float:
    """All tiles of one expert, one after the other."""
    blocks, rest = divmod(rows, config.block_m)
    full = _tiles_us(config, K_BLOCK_US[config.mma_type][config.block_m])
    if rest == 0:
        return blocks * full
    half = config.block_m > HALF_TILE and rest <= HALF_TILE
    return blocks * full + (_tiles_us(config, HALF_K_BLOCK_US) if half else full)


def _tiles_us(config: "_C.Config", k_block_us: float) -> float:
    """The tiles of one row block, L1 and L2."""
    return _k_blocks(config) * k_block_us + (config.l1_n_tiles + config.l2_n_tiles) * TILE_US


def _weight_bytes(config: "_C.Config") -> int:
    """Of one expert, padded to tiles."""
    return _k_blocks(config) * _C.weight_block_bytes(config.mma_type)


def _k_blocks(config: "_C.Config") -> int:
    """Of all weight tiles of one expert."""
    return config.l1_weight_tiles * config.l1_k_blocks + config.l2_weight_tiles * config.l2_k_blocks
