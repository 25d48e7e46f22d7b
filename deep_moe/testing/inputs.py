"""Random problems: activations, weights and their distributions. Everything is a function of a seed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import deep_moe
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
    """Natural-layout weights of all experts, and biases: what a checkpoint holds.

    e4m3 [E, N, K] and f32 [E, ceil(N/128), ceil(K/128)], or MXFP4: u8 [E, N, K/2] and e8m0 codes u8 [E, N, K/32].
    """

    gate: tuple[Tensor, Tensor]  # N = I, K = H
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]  # N = H, K = I
    biases: reference.Biases | None = None  # bf16

    @property
    def gate_up(self):
        """What `reference.layer` and `transform_weights` take."""
        return self.gate, self.up

    def transform(self, problem, out=None):
        """`transform_weights` of all that there is: (l1, l2)."""
        biases = {}
        if self.biases is not None:
            biases = dict(gate_up_bias=self.biases[:2], down_bias=self.biases.down)
        return deep_moe.transform_weights(problem, self.gate_up, self.down, out, **biases)

    def of_rank(self, rank: int, num_ranks: int) -> "Weights":
        """The contiguous slice of experts that `rank` owns (views)."""
        local = self.gate[0].shape[0] // num_ranks
        owned = slice(rank * local, (rank + 1) * local)
        return self._map(lambda tensor: tensor[owned])

    def to(self, device) -> "Weights":
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        parts = [(change(q), change(sf)) for q, sf in (self.gate, self.up, self.down)]
        return Weights(*parts, None if self.biases is None else reference.Biases(*map(change, self.biases)))

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
    parts = [_expert_matrices(*how, e, n, k, generator) for n, k in ((i, h), (i, h), (h, i))]
    return Weights(*parts, _random_biases(problem, generator) if problem.bias else None)


def _random_biases(problem, generator: torch.Generator) -> reference.Biases:
    """About half as large as the sums that they are added to, so that errors of either show."""
    parts = ((problem.intermediate, 0.5), (problem.intermediate, 0.5), (problem.hidden, 0.2))

    def draw(channels: int, size: float) -> Tensor:
        shape = problem.num_experts, channels
        return (torch.randn(shape, generator=generator, device=generator.device) * size).bfloat16()

    return reference.Biases(*(draw(*part) for part in parts))


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
