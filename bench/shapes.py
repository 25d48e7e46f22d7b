"""The model slices that the bench times, and the least a layer can take on a given chip."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import deep_moe
from deep_moe.ops import OPS

WEIGHT_BITS = {"fp8xfp8": 32, "fp8xmxfp4": 17}  # of four weights


@dataclass(frozen=True)
class Shape:
    """One model's MoE layer, cut to the experts that one rank holds."""

    name: str
    hidden: int
    intermediate: int
    topk: int
    experts_per_rank: int
    activation_clamp: float | None = None
    mma_type: str = "fp8xfp8"

    @property
    def expert_parameters(self) -> int:
        """Of gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert. Block scales, which are left out, add 0.02 %; MXFP4 has a byte for every 32 codes."""
        return self.expert_parameters * WEIGHT_BITS[self.mma_type] // 32

    def problem(self, num_ranks: int, max_tokens: int) -> deep_moe.Problem:
        """The layer that `num_ranks` ranks run with this slice each."""
        return deep_moe.Problem(
            num_experts=self.experts_per_rank * num_ranks,
            num_topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens_per_rank=max_tokens,
            mma_type=self.mma_type,
            activation_clamp=self.activation_clamp,
        )

    @property
    def op(self) -> Callable[..., None]:
        """The layer's function."""
        return getattr(deep_moe, OPS[self.mma_type].__name__)

    def flops(self, num_tokens: int) -> int:
        """Of the two GEMMs for one rank's tokens."""
        return 2 * num_tokens * self.topk * self.expert_parameters

    def wire_bytes(self, num_tokens: int, num_ranks: int) -> float:
        """Bytes a rank sends over NVLink with uniform routing: fp8 rows out to be pulled, bf16 rows back."""
        return num_tokens * self.topk * (1 - 1 / num_ranks) * 3 * self.hidden


SHAPES = {
    "flash": Shape("flash", hidden=4096, intermediate=2048, topk=6, experts_per_rank=32),
    "v3": Shape("v3", hidden=7168, intermediate=2048, topk=8, experts_per_rank=32),
    "pro": Shape("pro", hidden=7168, intermediate=3072, topk=6, experts_per_rank=48),
}


def shape_of(name: str, experts_per_rank: int | None, mma_type: str = "fp8xfp8") -> Shape:
    """A known shape, cut to another number of local experts if asked for."""
    if name not in SHAPES:
        raise SystemExit(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    shape = replace(SHAPES[name], mma_type=mma_type)
    return replace(shape, experts_per_rank=experts_per_rank) if experts_per_rank else shape


@dataclass(frozen=True)
class Ceilings:
    """What this chip can do at best, measured by roofline.py a moment ago."""

    read_gbs: float  # HBM, read only
    fp8_tflops: float  # dense 8192^3
    nvlink_gbs: float | None = None  # one direction, to one peer; None with one rank


def floor_us(shape: Shape, num_tokens: int, num_ranks: int, touched_experts: int, ceilings: Ceilings) -> float:
    """max(weights / bandwidth, flops / peak, wire): no layer can be faster, in µs."""
    weights = touched_experts * shape.expert_bytes / ceilings.read_gbs / 1e3
    compute = shape.flops(num_tokens) / ceilings.fp8_tflops / 1e6
    wire = shape.wire_bytes(num_tokens, num_ranks) / ceilings.nvlink_gbs / 1e3 if ceilings.nvlink_gbs else 0.0
    return max(weights, compute, wire)


def touched_experts(topk_idx_of_ranks: list[torch.Tensor], rank: int, experts_per_rank: int) -> int:
    """Local experts of `rank` that receive at least one row: their weights must be read."""
    used = torch.cat([idx.flatten().cpu() for idx in topk_idx_of_ranks]).unique()
    return int(((used >= rank * experts_per_rank) & (used < (rank + 1) * experts_per_rank)).sum())


def busiest_touched(topk_idx_of_ranks: list[torch.Tensor], experts_per_rank: int) -> int:
    """The same of the rank that has most of them."""
    ranks = range(len(topk_idx_of_ranks))
    return max(touched_experts(topk_idx_of_ranks, rank, experts_per_rank) for rank in ranks)
