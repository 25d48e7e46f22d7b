"""Run all ranks of a layer in one process through the public API, and compare with the reference.

with testing.World(problem, num_ranks=4, weights=weights) as world:
    inputs = world.inputs(counts=[8, 0, 33, 64], pattern=world.routing.random, seed=1)
    world.check(inputs, world.call(inputs, seed=1))
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import deep_moe
from deep_moe import reference
from deep_moe.ops import OPS
from deep_moe.testing.inputs import Weights, generator_of, random_activations, random_weights
from deep_moe.testing.metrics import Error, error_bar, error_of
from deep_moe.testing.poison import is_poison, poison, poison_buffer
from deep_moe.testing.routing import Pattern, Routing


@dataclass(frozen=True)
class RankInputs:
    """What one rank passes to `stage` (CPU tensors; moved to the rank's device by the harness)."""

    x: Tensor  # bf16 [T, H]
    topk_idx: Tensor  # int32 or int64 [T, K]
    topk_weights: Tensor  # f32 [T, K]
    count: int | None = None  # the device scalar `num_tokens`; None: all T
    quantised: bool = False  # stage e4m3 with scales instead of bf16
    routed_scaling_factor: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return self.x.shape[0] if self.count is None else self.count

    def staged(self, num_experts: int) -> reference.Staged:
        """The counted tokens as the reference stages them."""
        n = self.num_tokens
        x, idx, weights = self.x[:n], self.topk_idx[:n], self.topk_weights[:n]
        return reference.stage(x, idx, weights, num_experts, self.routed_scaling_factor)


def random_inputs(
    problem,
    num_tokens: int,
    pattern: Pattern,
    rank: int = 0,
    seed: int = 0,
    distribution: str = "zero-mean",
    **options,
) -> RankInputs:
    """One rank's random tokens, routed by `pattern`, with weights that sum to 1; `options` are fields of RankInputs."""
    generator = generator_of(seed * 1009 + rank)
    idx = pattern(rank, num_tokens, generator)
    weights = torch.rand(num_tokens, problem.num_topk, generator=generator)
    x = random_activations(problem, num_tokens, distribution, seed * 1009 + rank)
    return RankInputs(x, idx, weights / weights.sum(1, keepdim=True), **options)


def expected(problem, weights: Weights, inputs: RankInputs) -> Tensor:
    """The reference's bf16 [count, H] for one rank's inputs, computed where the weights are; on the CPU."""
    staged = to_weights(inputs.staged(problem.num_experts), weights)
    return reference.layer(staged, *layer_of(problem, weights)).cpu()


def layer_of(problem, weights: Weights) -> tuple:
    """What `reference.layer` and `reference.exact_layer` take besides the tokens."""
    return weights.gate_up, weights.down, reference.Activation.of(problem), weights.biases


def to_weights(staged: reference.Staged, weights: Weights) -> reference.Staged:
    """The staged tokens on the device of the weights."""
    return reference.Staged(*(part.to(weights.down[0].device) for part in staged))


def assert_close(problem, y: Tensor, wanted: Tensor, what: str = "y", bar: float | None = None) -> Error:
    """Assert that y [n, H] is the reference's within `bar` (default `error_bar`), and each token within its own."""
    error, row_bar = error_of(y, wanted), error_bar(problem, 1)
    bar = bar or error_bar(problem, int((wanted != 0).any(1).sum()))
    assert error.frobenius <= bar, f"{what}: {error}, bar {bar:.4f}"
    assert error.worst_row <= row_bar, f"{what}: {error}, bar of a row {row_bar:.4f}"
    return error


@dataclass
class RankResult:
    y: Tensor  # bf16 [T, H], poisoned before the call
    stats: Tensor  # i32 [E_local], from 0


class Rank:
    """One rank's objects, used from its own thread."""

    def __init__(self, group, problem, weights: Weights, num_sms: int | None):
        self.group = group
        self.problem = problem
        self.buffer = deep_moe.SymmBuffer(group, problem, num_sms=num_sms)
        self.device = self.buffer.x.device
        own = weights.of_rank(group.rank(), group.size()).to(self.device)
        self.l1, self.l2 = own.transform(problem)

    def put(self, inputs: RankInputs) -> tuple:
        """(x, topk_idx, topk_weights, num_tokens) for `stage`, on the device."""
        x = reference.quantize_rows(inputs.x) if inputs.quantised else (inputs.x,)
        x = tuple(part.to(self.device) for part in x)
        count = inputs.count
        count = None if count is None else torch.tensor(count, dtype=torch.int32, device=self.device)
        idx, weights = inputs.topk_idx.to(self.device), inputs.topk_weights.to(self.device)
        return x if inputs.quantised else x[0], idx, weights, count

    def new_y(self, inputs: RankInputs) -> Tensor:
        return poison(torch.empty(inputs.x.shape, dtype=torch.bfloat16, device=self.device))

    def new_stats(self) -> Tensor:
        local = self.problem.num_experts // self.group.size()
        return torch.zeros(local, dtype=torch.int32, device=self.device)

    def stage(self, put: tuple, routed_scaling_factor: float = 1.0) -> None:
        x, idx, weights, count = put
        deep_moe.stage(self.buffer, x, idx, weights, num_tokens=count, routed_scaling_factor=routed_scaling_factor)

    def mega(self, y: Tensor, stats: Tensor | None = None, bound: int | None = None) -> None:
        OPS[self.problem.mma_type](
            y, self.l1, self.l2, self.buffer, num_tokens_bound=bound, cumulative_local_expert_recv_stats=stats
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def call(self, inputs: RankInputs, bound: int | None = None) -> RankResult:
        """stage and the mega op of the mma_type, finished, with a poisoned y."""
        y, stats = self.new_y(inputs), self.new_stats()
        self.stage(self.put(inputs), inputs.routed_scaling_factor)
        self.mega(y, stats, bound)
        self.synchronize()
        return RankResult(y.cpu(), stats.cpu())


class World:
    """All ranks of one problem in this process; a context manager, or `close()` it.

    Args:
        device: what `LocalGroup` takes: "cpu" (emulator), "cuda", or a list of devices.
        weights: of all experts, on any device; random ones by default.
    """

    def __init__(
        self, problem, num_ranks: int = 1, device="cpu", weights: Weights | None = None, num_sms: int | None = None
    ):
        self.problem, self.num_ranks, self.device = problem, num_ranks, device
        weights = weights or random_weights(problem)
        self.routing = Routing.of(problem, num_ranks)
        self.broken = False  # a call failed: the buffer is unusable
        self._group = deep_moe.LocalGroup(num_ranks, device)
        self.ranks: list[Rank] = self._group.run(lambda group: Rank(group, problem, weights, num_sms))
        self.weights = weights.to(self.ranks[0].device)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the buffers, collectively."""
        ranks, self.ranks = self.ranks, []
        if ranks:
            self._group.run(lambda group: ranks[group.rank()].buffer.destroy())

    @property
    def on_emulator(self) -> bool:
        return self.device == "cpu"

    def bound_of(self, block_m: int) -> int:
        """The largest published bound whose kernel has tiles of at most so many rows."""
        problem, ranks = self.problem, self.num_ranks
        variants = zip(problem.bound_classes(ranks), problem.configs(ranks), strict=True)
        return max(bound for bound, config in variants if config.block_m <= block_m)

    def inputs(
        self,
        counts: Sequence[int],
        pattern: Pattern | None = None,
        seed: int = 0,
        **options,
    ) -> list[RankInputs]:
        """Random inputs with counts[r] tokens on rank r; `options` are those of `random_inputs`."""
        pattern = pattern or self.routing.random
        return [random_inputs(self.problem, count, pattern, rank, seed, **options) for rank, count in enumerate(counts)]

    def run(self, body: Callable[[Rank], object], seed: int = 0, **emulator_options) -> list:
        """body(rank) in every rank's thread; marks the world broken when one raises."""
        options = contextlib.nullcontext()
        if self.on_emulator:
            options = deep_moe.emulator.options(seed=seed, **emulator_options)
        try:
            with options:
                return self._group.run(lambda group: body(self.ranks[group.rank()]))
        except Exception:
            self.broken = True
            raise

    def poison(self) -> None:
        """Poison every rank's buffer; no launch may be in flight."""
        for rank in self.ranks:
            poison_buffer(rank.buffer)
        for rank in self.ranks:
            if rank.device.type == "cuda":
                torch.cuda.synchronize(rank.device)

    def call(
        self, inputs: Sequence[RankInputs], bound: int | None = None, seed: int = 0, **emulator_options
    ) -> list[RankResult]:
        """One poisoned layer on all ranks."""
        self.poison()
        return self.run(lambda rank: rank.call(inputs[rank.group.rank()], bound), seed, **emulator_options)

    def staged(self, inputs: RankInputs) -> reference.Staged:
        """One rank's staged tokens on the device of the weights."""
        return to_weights(inputs.staged(self.problem.num_experts), self.weights)

    def expected_of_all(self, inputs: Sequence[RankInputs]) -> list[Tensor]:
        """`expected` of every rank, computed in one go: a token's result depends on nothing but the token."""
        parts = [self.staged(given) for given in inputs]
        codes = torch.cat([part.x.view(torch.uint8) for part in parts]).view(parts[0].x.dtype)
        staged = reference.Staged(codes, *(torch.cat(column) for column in list(zip(*parts, strict=True))[1:]))
        y = reference.layer(staged, *layer_of(self.problem, self.weights)).cpu()
        return list(y.split([given.num_tokens for given in inputs]))

    def expected(self, inputs: RankInputs) -> Tensor:
        """The reference's bf16 [count, H] for one rank."""
        return expected(self.problem, self.weights, inputs)

    def expected_stats(self, inputs: Sequence[RankInputs]) -> Tensor:
        """i32 [num_ranks, E_local]: rows that every local expert receives in one call."""
        experts = self.problem.num_experts
        ids = [rank.staged(experts).topk_idx for rank in inputs]
        return reference.recv_counts(ids, experts).view(self.num_ranks, -1)

    def check(
        self, inputs: Sequence[RankInputs], results: Sequence[RankResult], bar: float | None = None
    ) -> list[Error]:
        """Assert that every rank's y, untouched rows and statistics are right; the errors per rank.

        bar: of the relative Frobenius error; default `error_bar` of the number of tokens.
        """
        errors = []
        counts = self.expected_stats(inputs)
        wanted = self.expected_of_all(inputs)
        for rank, (given, result) in enumerate(zip(inputs, results, strict=True)):
            n = given.num_tokens
            errors.append(assert_close(self.problem, result.y[:n], wanted[rank], f"rank {rank}", bar))
            assert is_poison(result.y[n:]).all(), f"rank {rank}: a row at or beyond the count {n} was written"
            assert torch.equal(result.stats, counts[rank]), f"rank {rank}: received rows {result.stats.tolist()}"
        return errors

    def call_and_check(self, inputs: Sequence[RankInputs], bar: float | None = None, **options) -> list[RankResult]:
        """`call`, then `check`; returns the results."""
        results = self.call(inputs, **options)
        self.check(inputs, results, bar)
        return results


def run_layer(problem, num_ranks: int = 1, device="cpu", counts: Sequence[int] | None = None, **options):
    """One random layer in a world of its own: (inputs, results). `options` are those of `World.call`."""
    with World(problem, num_ranks, device) as world:
        inputs = world.inputs(counts or [problem.max_tokens_per_rank] * num_ranks)
        return inputs, world.call(inputs, **options)


def padded(inputs: RankInputs, num_rows: int, expert: int) -> RankInputs:
    """The same tokens as a CUDA-graph batch of `num_rows` rows: NaN padding rows that carry a real expert id."""
    n, extra = inputs.x.shape[0], num_rows - inputs.x.shape[0]
    tail = inputs.x.new_full((extra, inputs.x.shape[1]), float("nan"))
    idx = inputs.topk_idx.new_full((extra, inputs.topk_idx.shape[1]), expert)
    weights = inputs.topk_weights.new_ones(extra, inputs.topk_weights.shape[1])
    return replace(
        inputs,
        x=torch.cat([inputs.x, tail]),
        topk_idx=torch.cat([inputs.topk_idx, idx]),
        topk_weights=torch.cat([inputs.topk_weights, weights]),
        count=n,
    )
