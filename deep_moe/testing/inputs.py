"""Random problems: activations, weights and their distributions. Everything is a function of a seed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_moe import reference

Draw = Callable[..., Tensor]  # (*shape, generator=, device=) -> f32


def _normal(*shape: int, **kw) -> Tensor:
    return torch.randn(*shape, **kw)


def _shifted(*shape: int, **kw) -> Tensor:
    return torch.randn(*shape, **kw) + 0.3


def _positive(*shape: int, **kw) -> Tensor:
    return torch.rand(*shape, **kw) + 0.1


@dataclass(frozen=True)
class Distribution:
    """How activations and weights are drawn, with the mean that decides how sums grow."""

    draw: Draw
    mean: float

    def gain(self, depth: int) -> float:
        """Weight factor that keeps a sum over `depth` products near 1."""
        return 1.0 / (depth * self.mean**2 + depth**0.5)


DISTRIBUTIONS = {
    "zero-mean": Distribution(_normal, 0.0),
    "mean-0.3": Distribution(_shifted, 0.3),
    "same-sign": Distribution(_positive, 0.6),  # uniform 0.1-1.1: where chained accumulation loses 31 %
}


def generator_of(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Weights:
    """Natural-layout weights of all experts: what a checkpoint holds.

    e4m3 [E, N, K] and f32 [E, ceil(N/128), ceil(K/128)], or MXFP4: u8 [E, N, K/2] and e8m0 codes u8 [E, N, K/32].
    """

    gate: tuple[Tensor, Tensor]  # N = I, K = H
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]  # N = H, K = I

    @property
    def gate_up(self):
        """What `reference.layer` and `transform_weights` take."""
        return self.gate, self.up

    def of_rank(self, rank: int, num_ranks: int) -> "Weights":
        """The contiguous slice of experts that `rank` owns (views)."""
        local = self.gate[0].shape[0] // num_ranks
        owned = slice(rank * local, (rank + 1) * local)
        return Weights(*((q[owned], sf[owned]) for q, sf in (self.gate, self.up, self.down)))

    def to(self, device) -> "Weights":
        return Weights(*((q.to(device), sf.to(device)) for q, sf in (self.gate, self.up, self.down)))

    def fused_gate_up(self) -> tuple[Tensor, Tensor]:
        """Gate rows first, [E, 2I, H]; intermediate % 128 == 0 unless it is MXFP4."""
        codes = torch.cat([self.gate[0].view(torch.uint8), self.up[0].view(torch.uint8)], 1)
        return codes.view(self.gate[0].dtype), torch.cat([self.gate[1], self.up[1]], 1)


QUANTISERS = {"fp8xfp8": reference.quantize_blocks, "fp8xmxfp4": reference.quantize_mxfp4}


def _expert_matrices(
    quantise: Callable, distribution: Distribution, experts: int, n: int, k: int, generator
) -> tuple[Tensor, Tensor]:
    """[experts, n, k] drawn, scaled and quantised one expert at a time, to need little extra memory."""
    values, scales = None, None
    for e in range(experts):
        w = distribution.draw(n, k, generator=generator, device=generator.device) * distribution.gain(k)
        codes, sf = quantise(w)
        if values is None:
            values, scales = (part.new_empty(experts, *part.shape) for part in (codes, sf))
        values[e].copy_(codes)
        scales[e].copy_(sf)
    return values, scales


def random_weights(problem, distribution: str = "zero-mean", seed: int = 0, device="cpu") -> Weights:
    """Weights of all experts of `problem`. The same seed gives the same bytes on the same kind of device."""
    how = QUANTISERS[problem.mma_type], DISTRIBUTIONS[distribution]
    generator = generator_of(seed, device)
    e, h, i = problem.num_experts, problem.hidden, problem.intermediate
    return Weights(*(_expert_matrices(*how, e, n, k, generator) for n, k in ((i, h), (i, h), (h, i))))


def random_activations(
    problem, num_tokens: int, distribution: str = "zero-mean", seed: int = 0, device="cpu"
) -> Tensor:
    """bf16 [num_tokens, H]. Row t is the same for every num_tokens and device."""
    draw, chunk = DISTRIBUTIONS[distribution].draw, 64
    x = torch.empty(num_tokens, problem.hidden, dtype=torch.bfloat16)
    for start in range(0, num_tokens, chunk):
        rows = draw(chunk, problem.hidden, generator=generator_of(seed * 1_000_003 + start))
        x[start : start + chunk] = rows[: num_tokens - start]
    return x.to(device)
