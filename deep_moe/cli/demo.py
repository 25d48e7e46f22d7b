"""Run a MoE layer of random weights on this machine's GPUs, or on the emulator, and compare it with the reference."""

import argparse
import statistics
import time
import warnings
from typing import Any, NamedTuple

from ..version import __version__

EMULATOR_DEFAULTS = dict(ranks=4, tokens=[1, 32], hidden=512, intermediate=256, experts=16, topk=4)
GPU_DEFAULTS = dict(tokens=[1, 64, 2048], hidden=4096, intermediate=2048, experts=32, topk=6)  # and one rank per GPU
GPU_REPEATS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="default: one per GPU, or 4 on the emulator")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="tokens per rank, one table row each")
    parser.add_argument("--hidden", type=int, help="channels of a token")
    parser.add_argument("--intermediate", type=int, help="channels of an expert")
    parser.add_argument("--experts", type=int, help="experts of all ranks together")
    parser.add_argument("--topk", type=int, help="experts per token")
    parser.add_argument("--mma-type", default="fp8xfp8", help="activations x weights: fp8xfp8 (default) or fp8xmxfp4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", metavar="FILE", help="write what every warp did last, for ui.perfetto.dev")


class Row(NamedTuple):
    tokens: int
    error: float
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch without numpy, which nothing here needs
    from .. import Problem, testing, trace

    gpus, reason = usable_gpus()
    defaults = {**GPU_DEFAULTS, "ranks": len(gpus)} if gpus else EMULATOR_DEFAULTS
    a = argparse.Namespace(**{**defaults, **{k: v for k, v in vars(arguments).items() if v is not None}})
    problem = Problem(
        num_experts=a.experts,
        num_topk=a.topk,
        hidden=a.hidden,
        intermediate=a.intermediate,
        max_tokens_per_rank=max(a.tokens),
        mma_type=a.mma_type,
        overrides={"trace_events": trace.EVENTS} if arguments.trace else {},
    )
    where = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else f"the CPU emulator ({reason})"
    print(f"deep_moe {__version__} on {where}")
    print(
        f"{a.ranks} ranks, {a.experts} experts, top-{a.topk}, hidden {a.hidden}, intermediate {a.intermediate}, "
        f"{a.mma_type}; error: relative Frobenius, against deep_moe.reference\n",
        flush=True,
    )
    weights = testing.random_weights(problem, seed=a.seed, device=gpus[0] if gpus else "cpu")
    print(f"{'ranks':>6}{'tokens/rank':>13}{'error':>12}{'at most':>12}{'time':>13}")
    good = True
    with testing.World(problem, a.ranks, gpus or "cpu", weights) as world:
        for tokens in a.tokens:
            row = measure(world, tokens, a.seed, repeats=GPU_REPEATS if gpus else 0)
            time_text = f"{row.seconds * 1e6:.0f} us" if gpus else f"{row.seconds:.2f} s"
            bar = testing.error_bar(problem, tokens)
            good = good and row.error <= bar  # false for a NaN
            print(f"{a.ranks:>6}{row.tokens:>13}{row.error:>12.2e}{bar:>12.2e}{time_text:>13}", flush=True)
        if arguments.trace:
            traces = [rank.buffer.trace() for rank in world.ranks]
            trace.write_chrome_trace(arguments.trace, traces)
            print(f"\ntraced, in {arguments.trace}; {trace.summary(traces[0])}")
    print("\nok" if good else "\nFAILED: an error is too large")
    return 0 if good else 1


def usable_gpus() -> tuple[list[str], str]:
    """The devices that deep_moe has kernels for, or an empty list and the reason."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return [], "no usable GPU" if built else "this torch is built for CPUs only"
    found = range(torch.cuda.device_count())
    gpus = [f"cuda:{index}" for index in found if torch.cuda.get_device_capability(index)[0] == 9]
    return gpus, "" if gpus else "no SM90 GPU"


def measure(world: Any, tokens: int, seed: int, repeats: int) -> Row:
    """One layer call with `tokens` tokens on every rank: the worst rank's error and time.

    The time is the median of `repeats` calls, inputs staged before; of the first call where `repeats` is 0.
    """
    from .. import testing

    inputs = world.inputs([tokens] * world.num_ranks, seed=seed)

    def call(rank: Any) -> tuple[Any, float]:
        given = inputs[rank.group.rank()]
        y = rank.new_y(given)
        rank.stage(rank.put(given))
        times = []
        for _ in range(1 + repeats):
            rank.synchronize()
            rank.group.barrier()
            start = time.perf_counter()
            rank.mega(y)
            rank.synchronize()
            times.append(time.perf_counter() - start)
        return y.cpu(), statistics.median(times[1:] or times)

    results = world.run(call, seed=seed)
    errors = [
        testing.error_of(y, world.expected(given)).frobenius for given, (y, _) in zip(inputs, results, strict=True)
    ]
    return Row(tokens, max(errors), max(seconds for _, seconds in results))
