"""Routing patterns: who goes to which expert. A pattern is a function (rank, num_tokens, generator) -> i64 [T, K]."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_moe.testing.inputs import generator_of

Pattern = Callable[[int, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Routing:
    """The patterns of one problem on `num_ranks` ranks."""

    num_experts: int
    num_topk: int
    num_ranks: int

    @classmethod
    def of(cls, problem, num_ranks: int) -> "Routing":
        return cls(problem.num_experts, problem.num_topk, num_ranks)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    def random(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Distinct experts per token, as a router's top-k gives."""
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        return scores.topk(min(self.num_topk, self.num_experts), 1).indices

    def zipf(self, exponent: float = 1.0, seed: int = 0) -> Pattern:
        """Distinct experts of unequal popularity: the n-th of them is chosen in proportion to n ** -exponent.

        Which expert is the n-th follows from the seed, so that all ranks agree. Drawn where the generator is.
        """
        popularity = torch.arange(1, self.num_experts + 1).log().mul(-exponent)
        popularity = popularity[torch.randperm(self.num_experts, generator=generator_of(seed))]

        def pattern(rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
            # The largest of log-probabilities plus Gumbel noise are a sample without replacement.
            waits = torch.empty(num_tokens, self.num_experts, device=generator.device).exponential_(generator=generator)
            scores = popularity.to(generator.device) - waits.log()
            return scores.topk(min(self.num_topk, self.num_experts), 1).indices

        return pattern

    def duplicates(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Independent slots: experts repeat within a token."""
        return torch.randint(self.num_experts, (num_tokens, self.num_topk), generator=generator)

    def with_holes(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """A third of all slots is -1; the first token has none left, the second misses a slot in the middle."""
        idx = self.duplicates(rank, num_tokens, generator)
        holes = torch.rand(num_tokens, self.num_topk, generator=generator) < 1 / 3
        holes[:1] = True
        holes[1:2] = False
        holes[1:2, self.num_topk // 2] = True
        return idx.masked_fill(holes, -1)

    def nobody(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        return torch.full((num_tokens, self.num_topk), -1)

    def to_expert(self, expert: int) -> Pattern:
        """Every slot of every token goes to one expert."""
        return lambda rank, num_tokens, generator: torch.full((num_tokens, self.num_topk), expert)

    def first_slot_to_expert(self, expert: int) -> Pattern:
        """One row per token, all to one expert: exactly num_tokens rows."""

        def pattern(rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
            idx = self.nobody(rank, num_tokens, generator)
            idx[:, 0] = expert
            return idx

        return pattern

    def to_rank(self, owner: int) -> Pattern:
        """Every slot goes to some expert of one rank."""

        def pattern(rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
            local = torch.randint(self.num_local, (num_tokens, self.num_topk), generator=generator)
            return owner * self.num_local + local

        return pattern

    def local_only(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Nothing leaves its rank."""
        return self.to_rank(rank)(rank, num_tokens, generator)

    def one_row_per_expert(self, rank: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Over all ranks together every expert receives one row, as far as the tokens reach; other slots are -1."""
        share = torch.arange(rank, self.num_experts, self.num_ranks)[: num_tokens * self.num_topk]
        idx = torch.full((num_tokens * self.num_topk,), -1)
        idx[: share.numel()] = share
        return idx.view(num_tokens, self.num_topk)
