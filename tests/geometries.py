"""The geometries of the layer tests. An emulator build is one (geometry, tile variant), and the default suite may need
32 of them: reuse one of these before adding another."""

from __future__ import annotations

from dataclasses import dataclass, field

import deep_moe


@dataclass(frozen=True)
class Geometry:
    """One symmetric buffer: a problem on a number of ranks."""

    ranks: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    max_tokens: int
    overrides: dict = field(default_factory=dict, hash=False)  # of the configuration, such as a ring that wraps
    activation: str = "swiglu"
    bias: bool = False
    mma_type: str | None = None  # of these tests alone; None: of the run (--mma-type)

    def problem(
        self,
        activation_clamp: float | None = None,
        activation_alpha: float | None = None,
        mma_type: str = "fp8xfp8",
    ) -> deep_moe.Problem:
        """With MXFP4 weights intermediate is rounded up to whole groups."""
        mma_type = self.mma_type or mma_type
        intermediate = self.intermediate
        if mma_type == "fp8xmxfp4":
            intermediate = -(-intermediate // 32) * 32
        return deep_moe.Problem(
            num_experts=self.experts,
            num_topk=self.topk,
            hidden=self.hidden,
            intermediate=intermediate,
            max_tokens_per_rank=self.max_tokens,
            mma_type=mma_type,
            activation=self.activation,
            activation_clamp=activation_clamp,
            activation_alpha=activation_alpha,
            bias=self.bias,
            overrides=self.overrides,
        )


SMALL_RING = dict(ring_rows=512, lag_blocks=2, unit_blocks=2)
# MXFP4 layers for blocks of 128 rows: up to five of an expert, no size a multiple of a chunk of decoded weights; and
# with tiles of one chunk
MANY_ROWS = dict(experts=4, topk=2, hidden=832, intermediate=416, max_tokens=300, mma_type="fp8xmxfp4")
MANY_ROWS_RING = dict(lag_blocks=2, unit_blocks=2, ring_rows=1024)
MANY_ROWS_SHORT = dict(
    experts=3,
    topk=2,
    hidden=192,
    intermediate=96,
    max_tokens=300,
    activation="swigluoai",
    bias=True,
    mma_type="fp8xmxfp4",
)

GEOMETRIES = {
    # one model on 1, 2, 4 and 8 ranks; max_tokens above the class of 64-row tiles except on 4 ranks
    "main-1": Geometry(1, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=512),
    "main-2": Geometry(2, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=256),
    "main-4": Geometry(4, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=64),
    "main-8": Geometry(8, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=64),
    # the cheapest that still has two classes: for many calls
    "small": Geometry(2, experts=2, topk=1, hidden=128, intermediate=128, max_tokens=200),
    # 64-row tiles: more L2 tiles than L1 tiles on a ring with room, so that units of both phases alternate
    "ring": Geometry(2, experts=4, topk=2, hidden=320, intermediate=128, max_tokens=256, overrides=SMALL_RING),
    # more K blocks than stages: tiles are announced in mid-tile; ragged everywhere
    "long-k": Geometry(
        2,
        experts=4,
        topk=2,
        hidden=576,
        intermediate=528,
        max_tokens=200,
        overrides=dict(ring_rows=512, lag_blocks=2, unit_blocks=1),
    ),
    # 8-row tiles through a ring of 16 blocks, and the same model in 64-row tiles; no size is a multiple of a tile
    "wrap-8": Geometry(
        2,
        experts=4,
        topk=2,
        hidden=704,
        intermediate=400,
        max_tokens=64,
        overrides=dict(block_m=8, ring_rows=128, lag_blocks=2, unit_blocks=2),
    ),
    "wrap-64": Geometry(
        2, experts=4, topk=2, hidden=704, intermediate=400, max_tokens=64, overrides=SMALL_RING | dict(block_m=64)
    ),
    # one rank with bounds on both sides of 256 entries, up to which it routes in every CTA; all tile heights
    "lone": Geometry(1, experts=4, topk=1, hidden=320, intermediate=144, max_tokens=300),
    # 8-row tiles at every count: three tokens have 27 entries, four have more than the 32 that are not pulled
    "direct": Geometry(1, experts=12, topk=9, hidden=320, intermediate=144, max_tokens=40, overrides=dict(block_m=8)),
    # main-4 with kernels that trace, with room for a small layer
    "traced": Geometry(
        4, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=64, overrides=dict(trace_events=128)
    ),
    "traced-1": Geometry(
        1, experts=16, topk=4, hidden=512, intermediate=256, max_tokens=80, overrides=dict(trace_events=128)
    ),
    # like gpt-oss: all tile heights, no size a multiple of a tile; one model on 1 and 2 ranks
    "oss-1": Geometry(
        1, experts=4, topk=3, hidden=320, intermediate=208, max_tokens=160, activation="swigluoai", bias=True
    ),
    "oss-2": Geometry(
        2, experts=4, topk=3, hidden=320, intermediate=208, max_tokens=80, activation="swigluoai", bias=True
    ),
    # one of the two without the other; less than a tile
    "swiglu-bias": Geometry(
        1, experts=4, topk=2, hidden=192, intermediate=80, max_tokens=40, overrides=dict(block_m=64), bias=True
    ),
    "swigluoai": Geometry(
        1,
        experts=4,
        topk=2,
        hidden=192,
        intermediate=80,
        max_tokens=40,
        overrides=dict(block_m=8),
        activation="swigluoai",
    ),
    # MXFP4 weights: all tile heights; no size a multiple of a tile
    "mxfp4-2": Geometry(
        2, experts=4, topk=2, hidden=320, intermediate=160, max_tokens=100, overrides=SMALL_RING, mma_type="fp8xmxfp4"
    ),
    # an even number of K blocks in L1 and in L2
    "mxfp4-even": Geometry(
        2, experts=4, topk=2, hidden=448, intermediate=160, max_tokens=100, overrides=SMALL_RING, mma_type="fp8xmxfp4"
    ),
    # one rank: tokens that are not pulled, and like gpt-oss; 8, 16 and 24 rows
    "mxfp4-oss": Geometry(
        1,
        experts=4,
        topk=3,
        hidden=576,
        intermediate=96,
        max_tokens=20,
        activation="swigluoai",
        bias=True,
        mma_type="fp8xmxfp4",
    ),
    # 8-row tiles through a ring of 16 blocks, more K blocks than stages
    "mxfp4-wrap": Geometry(
        2,
        experts=4,
        topk=2,
        hidden=1728,
        intermediate=416,
        max_tokens=64,
        overrides=dict(block_m=8, ring_rows=128, lag_blocks=2, unit_blocks=2),
        mma_type="fp8xmxfp4",
    ),
    # decode warps: an odd number of K blocks, fewer of them than stages, rows that wrap
    "mxfp4-warps": Geometry(2, **MANY_ROWS, overrides=dict(MANY_ROWS_RING, block_m=128, decode_ahead=0)),
    "mxfp4-warps-short": Geometry(1, **MANY_ROWS_SHORT, overrides=dict(block_m=128, decode_ahead=0)),
    # weights decoded ahead, in the fewest slots
    "mxfp4-ahead": Geometry(2, **MANY_ROWS, overrides=dict(MANY_ROWS_RING, decode_ahead=1, decoded_slots=16)),
    "mxfp4-ahead-short": Geometry(1, **MANY_ROWS_SHORT, overrides=dict(block_m=128, decode_ahead=1, decoded_slots=16)),
    # CASES 8
    "768x1152": Geometry(2, experts=4, topk=1, hidden=768, intermediate=1152, max_tokens=32),
    "8192x192": Geometry(2, experts=2, topk=2, hidden=8192, intermediate=192, max_tokens=16),
    "64x2304": Geometry(1, experts=4, topk=2, hidden=64, intermediate=2304, max_tokens=32),
    "2880x1408": Geometry(2, experts=2, topk=1, hidden=2880, intermediate=1408, max_tokens=16),
    "896-experts": Geometry(2, experts=896, topk=16, hidden=64, intermediate=80, max_tokens=32),
    # the error bars of the contract
    "7168x2048": Geometry(1, experts=2, topk=1, hidden=7168, intermediate=2048, max_tokens=64),
    # too large for the emulator: both tile heights of the bars, and model slices
    "7168x2048-large": Geometry(1, experts=8, topk=2, hidden=7168, intermediate=2048, max_tokens=1024),
    "flash-1": Geometry(1, experts=32, topk=6, hidden=4096, intermediate=2048, max_tokens=8192),
    "v3-1": Geometry(1, experts=32, topk=8, hidden=7168, intermediate=2048, max_tokens=8192),
    "flash-8": Geometry(8, experts=32, topk=6, hidden=4096, intermediate=2048, max_tokens=1024),
}
