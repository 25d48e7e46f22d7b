"""Time many kernel candidates in one process: every combination of the given configuration fields.

    python bench/sweep.py --tokens 256,512 --set block_m=64,128          each tile with the order that goes with it
    python bench/sweep.py --shape v3 --tokens 1024,8192 --set lag_blocks=8,16,24 --set unit_blocks=4,8
    torchrun --nproc-per-node 2 bench/sweep.py --set lag_blocks=8,16,24,48

Fields are those of `Problem(overrides=...)`; combinations that make no kernel are left out with the reason. Candidates
share weights and inputs, each has a buffer of its own, and they are sampled in turns (cold L2, timing.py), so that a
drifting clock hurts all alike. The default is checked against `deep_moe.reference` before anything is timed, and the
others must give its bits: a token's value depends on no candidate. A wrong result ends the sweep with status 1.

The first row of a table is the default, which `deep_moe.config` chooses; the others follow by time. "ratio" is the time
over that of the default, "score" what the cost model (deep_moe/config/arch/sm90.py) expects. Times are medians, the
slowest rank's.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from mega import CHECKED_TOKENS, ERROR_BAR, Inputs, Truth, add_layer_options, check_layer_options, wrong
from shapes import Shape, shape_of
from timing import ColdTimer, Ranks

import deep_moe
from deep_moe import _C, testing
from deep_moe.config.arch import sm90

Settings = dict[str, list[int]]  # values to combine, by configuration field
HEADER = f"{'us':>8} {'ratio':>6} {'score':>8} {'bm':>4} {'lag':>4} {'unit':>4} {'ring':>6}  candidate"


@dataclass(frozen=True)
class Candidate:
    """A problem with forced configuration fields."""

    overrides: dict[str, int]
    problem: deep_moe.Problem

    @property
    def name(self) -> str:
        return " ".join(f"{field}={value}" for field, value in self.overrides.items()) or "default"

    def config_of(self, num_tokens: int, num_ranks: int) -> "_C.Config":
        """The variant that runs when no rank has more than `num_tokens` tokens."""
        bounds, configs = self.problem.bound_classes(num_ranks), self.problem.configs(num_ranks)
        return next(config for bound, config in zip(bounds, configs, strict=True) if bound >= num_tokens)


def candidates(base: deep_moe.Problem, settings: Settings, num_ranks: int, report: Callable) -> list[Candidate]:
    """The default, then each combination of the settings that makes a kernel; `report` is told about the others.

    Raises:
        SystemExit: a field or a value that no problem accepts.
    """
    found = [Candidate({}, base)]
    for values in itertools.product(*settings.values()) if settings else ():
        overrides = dict(zip(settings, values, strict=True))
        try:
            candidate = Candidate(overrides, replace(base, overrides=overrides))
        except ValueError as error:
            raise SystemExit(f"--set: {error}") from error
        try:
            candidate.problem.configs(num_ranks)
        except ValueError as error:
            report(f"# {candidate.name} left out: {error}")
            continue
        found.append(candidate)
    return found


def table(found: list[Candidate], times: dict[str, float], num_tokens: int, num_ranks: int) -> str:
    """The default, then the others from the fastest on. `times`: µs by name."""
    default, *others = found
    lines = [f"# {num_tokens} tokens per rank", HEADER]
    for candidate in [default, *sorted(others, key=lambda each: times[each.name])]:
        us, config = times[candidate.name], candidate.config_of(num_tokens, num_ranks)
        score = sm90.expected_us(config, num_tokens)
        lines.append(
            f"{us:8.1f} {us / times[default.name]:6.3f} {score:8.1f} {config.block_m:4} {config.lag_blocks:4} "
            f"{config.unit_blocks:4} {config.ring_rows:6}  {candidate.name}"
        )
    return "\n".join(lines)


class Sweep:
    """One shape: the weights, and the candidates with their buffers."""

    def __init__(self, shape: Shape, ranks: Ranks, args: argparse.Namespace) -> None:
        self.shape, self.ranks, self.args = shape, ranks, args
        self.problem = shape.problem(ranks.size, args.max_tokens)
        self.found = candidates(self.problem, args.set, ranks.size, ranks.print)
        self.weights = testing.random_weights(self.problem, args.distribution, seed=0, device=ranks.device)
        own = self.weights.of_rank(ranks.rank, ranks.size)
        self.l1, self.l2 = deep_moe.transform_weights(self.problem, own.gate_up, own.down)
        self.buffers = {each.name: deep_moe.SymmBuffer(ranks.group, each.problem) for each in self.found}
        self.timer = ColdTimer(ranks)

    def run(self, num_tokens: int) -> str:
        """Check and time all candidates with one token count; the table. SystemExit on a wrong result, on all ranks."""
        options = self.args.distribution, self.args.routing
        inputs = Inputs.random(self.problem, num_tokens, self.ranks, *options)
        y = torch.empty(num_tokens, self.shape.hidden, dtype=torch.bfloat16, device=self.ranks.device)
        calls, first = {}, None
        for name, buffer in self.buffers.items():
            deep_moe.stage(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)

            def call(buffer=buffer) -> None:
                self.shape.op(y, self.l1, self.l2, buffer, num_tokens_bound=num_tokens)

            testing.poison(y)
            call()
            if first is None:
                first = y.clone()
                self.check(first, inputs)
            elif self.ranks.max([float(not testing.same_bits(y, first))])[0]:
                raise SystemExit(f"{name}, {num_tokens} tokens: not the bits of the default")
            calls[name] = call, None
        times = self.timer.medians(calls, self.args.repeats)
        return table(self.found, times, num_tokens, self.ranks.size)

    def check(self, y: torch.Tensor, inputs: Inputs) -> None:
        """The default's result against the reference."""
        staged = inputs.staged(self.problem.num_experts)
        errors = self.ranks.largest(Truth.of(staged, self.weights, self.shape.activation_clamp).errors(y))
        bar = testing.error_bar(self.problem, min(len(y), CHECKED_TOKENS), ERROR_BAR[self.args.distribution])
        if wrong(errors | {"error_bar": bar}):
            raise SystemExit(f"the default is wrong with {len(y)} tokens: error bar {bar:.1e}, {errors}")

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.destroy()


def setting(text: str) -> tuple[str, list[int]]:
    """FIELD=A,B,... as (field, values)."""
    field, _, values = text.partition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=A,B,... with integers") from None
    if not field or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} names no field, or a value twice")
    return field, numbers


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="flash", help="flash, v3 or pro (default %(default)s)")
    add_layer_options(parser, "1024,2048,8192", repeats=9)
    parser.add_argument(
        "--set", action="append", type=setting, default=[], metavar="FIELD=A,B,...", help="values to combine"
    )
    args = parser.parse_args(argv)
    check_layer_options(parser, args)
    fields = [field for field, _ in args.set]
    if len(set(fields)) < len(fields):
        parser.error(f"--set names a field twice: {', '.join(fields)}")
    args.set = dict(args.set)
    return args


def main() -> int:
    args, ranks = arguments(), Ranks()
    if ranks.size > 1:
        ranks.connect()
    sweep = Sweep(shape_of(args.shape, args.experts_per_rank, args.mma_type), ranks, args)
    size = sum(each.problem.buffer_bytes(ranks.size) for each in sweep.found) / 2**20
    ranks.print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, deep_moe {deep_moe.__version__}, {args.shape}, "
        f"{args.distribution}, {args.routing} routing, {len(sweep.found)} candidates with {size:.0f} MiB of buffers"
    )
    for count in args.tokens:
        ranks.print(sweep.run(count))
    sweep.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
