"""Time many kernel candidates in one process: every combination of the given configuration fields.

    python bench/sweep.py --shape flash --tokens 1024,8192 --set block_m=64,128 --set lag_blocks=8,16,24 --set unit_blocks=4,8

The candidates share the weights and are sampled in turns (cold L2, timing.py), so that a drifting clock hurts all alike.
Their results must have the same bits: a token's value depends on no candidate. The first row of the table is what
`deep_moe.config` chooses; "to it" is the time relative to that row, "score" what its cost model expects of the candidate.
Under torchrun every rank runs every candidate, and times are the slowest rank's.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from mega import Inputs
from shapes import shape_of
from timing import ColdTimer, Ranks

import deep_moe
from deep_moe import testing
from deep_moe.config.arch import sm90


@dataclass
class Candidate:
    """One kernel variant: forced configuration fields, and a buffer that runs it."""

    overrides: dict[str, int]
    problem: deep_moe.Problem
    buffer: deep_moe.SymmBuffer

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.overrides.items()) or "default"


def candidates(base: deep_moe.Problem, settings: dict[str, list[int]], ranks: Ranks) -> list[Candidate]:
    """The default, and each combination of the settings that makes a valid configuration."""
    found = []
    for values in [None, *itertools.product(*settings.values())]:
        overrides = dict(zip(settings, values, strict=True)) if values else {}
        problem = replace(base, overrides=overrides)
        try:
            problem.configs(ranks.size)
        except ValueError as error:
            ranks.print(f"# left out {overrides}: {error}")
            continue
        found.append(Candidate(overrides, problem, deep_moe.SymmBuffer(ranks.group, problem)))
    return found


def time_candidates(found: list[Candidate], tokens: int, l1, l2, ranks: Ranks, repeats: int) -> None:
    """Check the candidates against each other and print one table."""
    base = found[0].problem
    inputs = Inputs.random(base, tokens, ranks, "zero-mean")
    y = torch.empty(tokens, base.hidden, dtype=torch.bfloat16, device=ranks.device)
    calls, first = {}, None
    for candidate in found:
        deep_moe.stage(candidate.buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)

        def call(buffer=candidate.buffer) -> None:
            deep_moe.fp8_mega_moe(y, l1, l2, buffer, num_tokens_bound=tokens)

        testing.poison(y)
        call()
        first = y.clone() if first is None else first
        if not testing.same_bits(y, first):
            raise RuntimeError(f"{candidate.name} with {tokens} tokens: not the bits of the default")
        calls[candidate.name] = (call, None)
    times = ColdTimer(ranks).medians(calls, repeats)
    ranks.print(f"# {tokens} tokens per rank\n{'us':>8} {'to it':>6} {'score':>8}  candidate")
    default = times[found[0].name]
    for candidate in found[:1] + sorted(found[1:], key=lambda each: times[each.name]):
        us = times[candidate.name]
        config = next(
            config
            for bound, config in zip(
                candidate.problem.bound_classes(ranks.size), candidate.problem.configs(ranks.size), strict=True
            )
            if bound >= tokens
        )
        ranks.print(f"{us:8.1f} {us / default:6.3f} {sm90.expected_us(config, tokens):8.1f}  {candidate.name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="flash", help="flash, v3 or pro (default %(default)s)")
    parser.add_argument("--tokens", default="1024,2048,8192", help="per rank (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of the buffers (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=A,B,...", help="values to combine")
    parser.add_argument("--repeats", type=int, default=9, help="samples per median (default %(default)s)")
    args = parser.parse_args()
    args.tokens = [int(count) for count in args.tokens.split(",")]
    fields = (each.split("=") for each in args.set)
    args.set = {name: [int(value) for value in values.split(",")] for name, values in fields}
    return args


def main() -> int:
    args, ranks = arguments(), Ranks()
    if ranks.size > 1:
        ranks.connect()
    shape = shape_of(args.shape)
    problem = deep_moe.Problem(
        num_experts=shape.experts_per_rank * ranks.size,
        num_topk=shape.topk,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        max_tokens_per_rank=args.max_tokens,
        activation_clamp=shape.activation_clamp,
    )
    own = testing.random_weights(problem, "zero-mean", seed=0, device=ranks.device).of_rank(ranks.rank, ranks.size)
    l1, l2 = deep_moe.transform_weights(problem, own.gate_up, own.down)
    found = candidates(problem, args.set, ranks)
    for tokens in args.tokens:
        time_candidates(found, tokens, l1, l2, ranks, args.repeats)
    for candidate in found:
        candidate.buffer.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
