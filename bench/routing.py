"""Which experts the tokens of a row choose: random ones, but as many different ones as are expected.

At few tokens the time of a layer is that of reading the weights of the experts that are touched, and one draw may touch
29 of 32 where 25.9 are expected. So, of DRAWS draws, a row takes the one whose busiest rank touches the number nearest
to the expectation. Ranks agree on it without a word: a draw is a function of its number and of the rank.
"""

import torch
from shapes import busiest_touched
from timing import Ranks
from torch import Tensor

from deep_moe import testing

DRAWS = 32
DRAW_SEEDS = 10**8  # apart; more than the seeds of all rows
SAMPLE_TOKENS = 1 << 14  # show how often an expert is chosen


def seed_of(num_tokens: int, rank: int) -> int:
    """Of a rank's random inputs of a row."""
    return 1000 * num_tokens + rank


def expected_busiest(probabilities: Tensor, num_tokens: int, num_ranks: int) -> float:
    """How many experts the busiest rank is expected to have touched by all ranks' tokens together.

    Exact with one rank. With several, experts count as independent, which is off by about 0.1.

    Args:
        probabilities: f64 [num_experts], that a token chooses an expert.
        num_tokens: of all ranks.
    """
    touched = (1 - (1 - probabilities.double()) ** num_tokens).view(num_ranks, -1)
    counts = torch.zeros(num_ranks, touched.shape[1] + 1, dtype=torch.float64)  # the distribution of each rank's number
    counts[:, 0] = 1
    for expert in touched.T:
        counts = counts * (1 - expert)[:, None] + counts.roll(1, 1) * expert[:, None]
    all_at_most = counts.cumsum(1).prod(0)
    return float((1 - all_at_most[:-1]).sum())


class Router:
    """Draws of experts and weights for the tokens of all ranks.

    Args:
        routing: "uniform", softmax top-k, as the competitors are timed with; or "zipf", other experts with their
            weights, the n-th most popular chosen in proportion to 1 / n.
    """

    def __init__(self, problem, ranks: Ranks, routing: str) -> None:
        self.problem, self.ranks = problem, ranks
        self.pattern = testing.Routing.of(problem, ranks.size).zipf() if routing == "zipf" else None

    def draw(self, rank: int, num_tokens: int, number: int) -> tuple[Tensor, Tensor]:
        """(i64 ids, f32 weights), both [num_tokens, K], of any rank."""
        seed = seed_of(num_tokens, rank) + DRAW_SEEDS * (1 + number)
        generator = testing.generator_of(seed, self.ranks.device)
        scores = torch.randn(num_tokens, self.problem.num_experts, generator=generator, device=self.ranks.device)
        scores = scores.softmax(-1)
        if self.pattern is None:
            ids = scores.topk(self.problem.num_topk).indices
        else:
            ids = self.pattern(rank, num_tokens, generator)
        return ids, scores.gather(1, ids)

    def probabilities(self) -> Tensor:
        """f64 [num_experts] on the CPU: how probably a token chooses an expert."""
        experts = self.problem.num_experts
        if self.pattern is None:
            return torch.full((experts,), self.problem.num_topk / experts, dtype=torch.float64)
        ids, _ = self.draw(0, SAMPLE_TOKENS, 0)
        return ids.flatten().bincount(minlength=experts).cpu().double() / SAMPLE_TOKENS

    def expected(self, num_tokens: int) -> float:
        """Experts that the busiest rank has touched, with num_tokens on each rank."""
        return expected_busiest(self.probabilities(), num_tokens * self.ranks.size, self.ranks.size)

    def touched(self, num_tokens: int, number: int) -> int:
        """The same of one draw."""
        ids = [self.draw(rank, num_tokens, number)[0] for rank in range(self.ranks.size)]
        return busiest_touched(ids, self.problem.num_experts // self.ranks.size)

    def typical(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """This rank's ids and weights of the draw that is nearest to the expectation, the first of equals."""
        expected, best, least = self.expected(num_tokens), 0, float("inf")
        for number in range(DRAWS):
            distance = abs(self.touched(num_tokens, number) - expected)
            if distance < least:
                best, least = number, distance
            if least <= 0.5:  # no whole number is nearer
                break
        return self.draw(self.ranks.rank, num_tokens, best)
