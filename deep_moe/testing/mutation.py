"""The mutation test: plants each fault of `mutants` in a copy of the device headers and sees whether the emulator,
the reference or the statistics notice it.

A mutant is built and run in a process of its own, which it may hang or crash. The suite is a list of cases, cheapest
first: each is a few layers back to back, mostly on two ranks, so that the ranks drift apart, and runs under several
seeds.
"""

import dataclasses
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

import deep_moe
from deep_moe import testing
from deep_moe.errors import DeepMoeError, JitError
from deep_moe.jit import compilers, paths
from deep_moe.testing.mutants import Mutant

TRIAL_SECONDS = 300.0  # builds included; then a trial counts as hanging
WAIT_SECONDS = 0.2  # of emulated time: waits for other CTAs and ranks in a livelock end after this long


class Layer(NamedTuple):
    """One call on all ranks: tokens per rank, the name of a pattern of `Routing`, and what that takes."""

    counts: tuple[int, ...]
    pattern: str
    target: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers that follow each other without a host synchronisation, on one buffer."""

    name: str
    block_m: int
    layers: tuple[Layer, ...]
    mma_type: str = "fp8xfp8"
    experts: int = 10
    topk: int = 4
    hidden: int = 320  # no size is a multiple of a tile
    intermediate: int = 144
    max_tokens: int = 72
    ring_blocks: int = 2  # it wraps
    quantised: bool = False  # activations, before they are staged
    subnormals: bool = False  # the weights are those of `subnormal_weights`
    clamp: float | None = None
    activation: str = "swiglu"
    bias: bool = False
    decode_ahead: bool = False
    num_sms: int = 2
    num_ranks: int = 2

    def problem(self) -> deep_moe.Problem:
        """With one tile height. Every bound class has a kernel: the fewer there are, the less a case has to build."""
        return deep_moe.Problem(
            num_experts=self.experts,
            num_topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens_per_rank=self.max_tokens,
            mma_type=self.mma_type,
            activation=self.activation,
            activation_clamp=self.clamp,
            bias=self.bias,
            overrides=dict(
                block_m=self.block_m,
                ring_rows=self.ring_blocks * self.block_m,
                lag_blocks=1,
                unit_blocks=2,
                decode_ahead=int(self.decode_ahead),
            ),
        )


LAYERS = (
    Layer((70, 20), "random"),  # two CTAs route more than 256 entries
    Layer((0, 9), "with_holes"),
    Layer((66, 20), "to_rank", 1),  # one or two row blocks of 64 for an expert, or one for each of many
)
FULL_TILES = (
    Layer((0, 9), "with_holes"),
    Layer((40, 36), "to_rank", 1),  # about 150 rows for either of its experts: a full tile of 128 and less than a half
)
LONE_LAYERS = (  # up to 256 entries, which is 64 tokens, a lone rank routes in every CTA
    Layer((64,), "duplicates"),
    Layer((9,), "with_holes"),
    Layer((70,), "random"),
    Layer((64,), "random"),
    Layer((5,), "random"),
    Layer((64,), "random"),
)
# A lone rank does not pull the rows of up to four tokens with up to 32 entries: here of all but the first layer.
DIRECT_LAYERS = (
    Layer((4,), "random"),
    Layer((1,), "to_expert", 0),  # two blocks
    Layer((3,), "with_holes"),
    Layer((3,), "duplicates"),
)
# As gpt-oss has it, in one case of every tile height; the others have neither.
OSS = dict(activation="swigluoai", clamp=1.5, bias=True)
# MXFP4: so few tokens that there is one bound class; the last layer has 52 rows for an expert.
MXFP4_LAYERS = (
    Layer((7, 4), "random"),
    Layer((7, 6), "to_rank", 1),  # about 10 rows for an expert
    Layer((0, 7), "with_holes"),
    Layer((7, 6), "to_expert", 7),
)
MXFP4 = dict(mma_type="fp8xmxfp4", intermediate=160, max_tokens=7, ring_blocks=16)
CASES = (
    Case("8-row tiles, rows not pulled", 8, DIRECT_LAYERS, topk=9, ring_blocks=32, num_ranks=1, **OSS),
    Case("64-row tiles", 64, LAYERS, **OSS),
    # L2 tiles of two stages, the second of which holds one K block; a ring that wraps, in the last layer for one block.
    Case("8-row tiles", 8, (*LAYERS, Layer((33, 0), "to_expert", 3)), intermediate=528, ring_blocks=16, clamp=0.4),
    # L2 tiles of 7 stages, one more than the pipeline has.
    Case(
        "8-row tiles, long L2 tiles",
        8,
        (Layer((6, 3), "random"),),
        experts=4,
        hidden=128,
        intermediate=3216,
        ring_blocks=16,
    ),
    Case("8-row tiles, one rank", 8, LONE_LAYERS, experts=40, ring_blocks=32, num_ranks=1),
    # Only the ring of tasks holds the scheduler back, and every CTA has counters to clear.
    Case("many experts, one K block", 64, LAYERS[::-1], experts=80, hidden=128, intermediate=64, ring_blocks=48),
    Case("64-row tiles, clamp", 64, LAYERS[1:2], clamp=0.4),
    Case("128-row tiles, clamp", 128, LAYERS, clamp=0.4),
    # Twice as many L2 tiles as L1 tiles, and a ring with room: units of both phases alternate.
    Case("64-row tiles, 3 CTAs", 64, LAYERS[::-1], intermediate=112, ring_blocks=4, num_sms=3),
    # Tiles of more K blocks than stages: the warpgroups keep their distance, tiles are announced during the next one.
    Case("128-row tiles, many K blocks", 128, FULL_TILES, experts=4, hidden=640, intermediate=528, **OSS),
    # Its only CTA routes more than 256 entries.
    Case("64-row tiles, many K blocks", 64, LAYERS[1:], hidden=704, num_sms=1),
    Case(
        "MXFP4, 8-row tiles, rows not pulled",
        8,
        DIRECT_LAYERS,
        topk=9,
        num_ranks=1,
        hidden=448,
        **OSS,
        **MXFP4 | dict(max_tokens=6, ring_blocks=32),
    ),
    Case("MXFP4, 8-row tiles", 8, MXFP4_LAYERS, **MXFP4),
    # An odd number of chunks. Two K blocks at a time, as in all but the case before this.
    Case("MXFP4, 24-row tiles", 24, MXFP4_LAYERS, hidden=448, **OSS, **MXFP4),
    # L1 tiles of more K blocks than stages.
    Case("MXFP4, 64-row tiles", 64, MXFP4_LAYERS[1:], hidden=1472, quantised=True, **MXFP4),
    # Tiles of more K blocks than stages, and of fewer.
    Case("MXFP4, decode warps", 128, MXFP4_LAYERS, hidden=1472, **OSS, **MXFP4),
    # Up to three readers of a chunk, and slots that are used again.
    Case(
        "MXFP4, decoded ahead",
        128,
        (Layer((150, 120), "to_expert", 7), Layer((150, 90), "random"), Layer((0, 140), "to_expert", 50)),
        experts=80,
        topk=1,
        num_sms=5,
        hidden=1472,
        decode_ahead=True,
        **OSS,
        **MXFP4 | dict(max_tokens=150, ring_blocks=2),
    ),
    Case(
        "MXFP4, subnormal weights",
        16,
        (Layer((35,), "random"),),
        experts=7,
        topk=1,
        num_ranks=1,
        subnormals=True,
        hidden=448,
        **MXFP4 | dict(max_tokens=35),
    ),
)


class Caught(AssertionError):
    """A result that is wrong; the message says how, first in a word or two."""


# Of the headers that this process compiles.
@functools.cache
def _world(case: Case) -> testing.World:
    problem = case.problem()
    weights = subnormal_weights(problem) if case.subnormals else None
    return testing.World(problem, case.num_ranks, weights=weights, num_sms=case.num_sms)


@functools.cache
def _inputs(case: Case) -> list[list[testing.RankInputs]]:
    """Per layer and rank."""
    world, made = _world(case), []
    for seed, layer in enumerate(case.layers):
        pattern = getattr(world.routing, layer.pattern)
        pattern = pattern if layer.target is None else pattern(layer.target)
        made.append(world.inputs(layer.counts, pattern, seed, routed_scaling_factor=1.5, quantised=case.quantised))
        if case.subnormals:
            for given in made[-1]:
                given.x[:, _is_large(torch.arange(case.hidden))] = 0
    return made


def _is_large(channels: torch.Tensor) -> torch.Tensor:
    """Of K: whether `subnormal_weights` are large there. One of the four groups that share a block's scale."""
    return channels % 128 // 32 == 1


def subnormal_weights(problem: deep_moe.Problem) -> testing.Weights:
    """MXFP4 weights that are decoded with the smallest exponents, and a result to which all of them matter.

    An expert has only zeros and one magnitude of e2m1, of either sign, so that one wrong entry of a table shows. A
    quarter of the weights are 11 to 14 binades above the others: they decide the scales of the blocks, but are
    multiplied by zeros, which are in the activations and, for gates of zero, in the intermediate.
    """
    generator = testing.generator_of(0)

    def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        expert, row, group = torch.meshgrid(*map(torch.arange, (problem.num_experts, n, k // 32)), indexing="ij")
        magnitude = 1 + expert % 7  # as a code; with its exponent it is 1 or 1.5 times the same power
        drawn = torch.randint(4, (*group.shape, 32), generator=generator)
        codes = drawn % 2 * magnitude[..., None] + drawn // 2 * 8
        above = _is_large(group * 32) * (11 + (expert + row // 128 + group // 4) % 4)
        packed = (codes[..., ::2] + codes[..., 1::2] * 16).flatten(2)
        return packed.to(torch.uint8), (124 - magnitude // 2 + above).to(torch.uint8)

    h, i = problem.hidden, problem.intermediate
    gate = matrix(i, h)
    gate[0][:, _is_large(torch.arange(i))] = 0
    return testing.Weights(gate, matrix(i, h), matrix(h, i))


@functools.cache
def _wanted(case: Case) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """y per layer and rank; the rows that the experts of each rank receive in all layers."""
    world, layers = _world(case), _inputs(case)
    return [world.expected_of_all(inputs) for inputs in layers], sum(map(world.expected_stats, layers))


class RankSeen(NamedTuple):
    """What a rank has computed."""

    ys: list[torch.Tensor]  # per layer
    stats: torch.Tensor  # accumulated over the layers


def run_case(case: Case, seed: int) -> list[RankSeen]:
    """All layers on the emulator; raises what it finds."""
    world, layers = _world(case), _inputs(case)

    def body(rank: testing.Rank) -> RankSeen:
        own = [inputs[rank.group.rank()] for inputs in layers]
        prepared = [(rank.put(given), rank.new_y(given)) for given in own]
        stats = rank.new_stats()
        for put, y in prepared:
            rank.stage(put, own[0].routed_scaling_factor)
            rank.mega(y, stats)
        return RankSeen([y for _, y in prepared], stats)

    world.poison()
    return world.run(body, seed=seed)


def check_case(case: Case, seen: list[RankSeen]) -> None:
    """Every layer against the reference, and the received rows; raises Caught."""
    problem = _world(case).problem
    wanted, rows = _wanted(case)
    for step, of_ranks in enumerate(wanted):
        for rank, truth in enumerate(of_ranks):
            where = f"{case.name}: layer {step}, rank {rank}"
            error = testing.error_of(seen[rank].ys[step], truth)
            bar = testing.error_bar(problem, int((truth != 0).any(1).sum()))
            if not error.frobenius < float("inf"):
                raise Caught(f"wrong result: {where}: NaN, or not zero where no expert is")
            if error.frobenius > bar or error.worst_row > testing.error_bar(problem, 1):
                raise Caught(f"error too large: {where}: {error.frobenius:.1e}, worst token {error.worst_row:.1e}")
    for rank, (_, stats) in enumerate(seen):
        if not torch.equal(stats, rows[rank]):
            raise Caught(f"statistics wrong: {case.name}: rank {rank}: {stats.tolist()}, not {rows[rank].tolist()}")


def run_suite(seeds: int, cases: str = "") -> None:
    """Every case with `cases` in its name, under every seed; raises at the first thing that is noticed."""
    first: dict[Case, list[RankSeen]] = {}
    for seed in range(seeds):
        for case in (each for each in CASES if cases in each.name):
            seen = run_case(case, seed)
            check_case(case, seen)
            for ours, others in zip(seen, first.setdefault(case, seen), strict=True):
                if not all(map(testing.same_bits, ours.ys, others.ys)):
                    raise Caught(f"wrong result: {case.name}: seed {seed} gives other bits than seed 0")


def describe(error: BaseException) -> str:
    """What caught a mutant, in one line."""
    line = str(error).splitlines()[0] if str(error) else ""
    return line if isinstance(error, Caught) else f"{type(error).__name__}: {line}"


def trial_process(include: Path, cache: Path, seeds: int, cases: str, pipe: Connection) -> None:
    """Body of a trial's process: sends what the suite noticed ("": nothing), or the JitError of the build."""
    os.environ.update(DEEP_MOE_CACHE_DIR=str(cache), DEEP_MOE_TIMEOUT=str(WAIT_SECONDS), DEEP_MOE_JIT="allow")
    torch.set_num_threads(1)
    compilers.Gxx.optimisation = "-O0"  # a kernel runs for a second or two, less than -O2 takes to compile it
    paths.use_include_dir(include)
    verdict: str | JitError = ""
    try:
        run_suite(seeds, cases)
    except JitError as error:
        verdict = error
    except (DeepMoeError, Caught) as error:
        verdict = describe(error)
    pipe.send(verdict)
    os._exit(0)  # a world with a fault is not worth tidying up


class Outcome(NamedTuple):
    """What became of a mutant (None: of the headers as they are)."""

    mutant: Mutant | None
    caught: str  # by what; "" when nothing noticed it
    seconds: float


def mutated(mutant: Mutant, headers: Path) -> str:
    """Its file's text with the fault; ValueError where what it replaces is not there."""
    text = (headers / "deep_moe" / mutant.file).read_text(encoding="utf-8")
    found = text.count(mutant.old)
    if found != mutant.count:
        raise ValueError(
            f"mutant {mutant.name!r}: its text occurs {found} times in {mutant.file}, not {mutant.count}; "
            "bring deep_moe/testing/mutants up to date with the headers"
        )
    return text.replace(mutant.old, mutant.new)


@functools.cache
def _context():
    """Starts processes from a small server that has loaded torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def try_mutant(mutant: Mutant | None, seeds: int, folder: Path, limit: float = TRIAL_SECONDS) -> Outcome:
    """Builds and runs the headers with this mutant (None: as they are) in a process of its own.

    folder: holds `include`, the headers, and gets `cache`, for kernels; mutants may share it, because the content of
    the headers decides the entry. limit: seconds.
    Raises ValueError when the mutant's text is not in the headers, JitError when it does not compile, RuntimeError when
    the suite itself is wrong.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=folder) as name:
        include = Path(name) / "include"
        shutil.copytree(folder / "include", include)
        if mutant:
            (include / "deep_moe" / mutant.file).write_text(mutated(mutant, folder / "include"), encoding="utf-8")
        ours, theirs = _context().Pipe()
        arguments = include, folder / "cache", seeds, mutant.cases if mutant else "", theirs
        process = _context().Process(target=trial_process, args=arguments)
        process.start()
        theirs.close()
        verdict = _verdict(process, ours, limit)
        process.join()
    if isinstance(verdict, JitError):
        raise JitError(f"mutant {mutant.name if mutant else None!r} does not compile:\n{verdict}") from verdict
    return Outcome(mutant, verdict, time.monotonic() - start)


def _verdict(process: multiprocessing.process.BaseProcess, pipe: Connection, limit: float) -> str | JitError:
    """What the process sends, or how it ended without."""
    if not pipe.poll(limit):
        process.kill()
        return f"time limit: more than {limit:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        if process.exitcode >= 0:  # not the mutant's doing
            raise RuntimeError(f"a trial ended with exit status {process.exitcode}; see above") from None
        return f"crash: {signal.Signals(-process.exitcode).name}"


def try_mutants(
    mutants: Sequence[Mutant | None], seeds: int, jobs: int = 1, progress: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """The outcomes of `mutants`, `jobs` at a time. progress: called with each, in order, as soon as it is known."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="deep_moe-mutation-") as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        shutil.copytree(paths.include_dir(), folder / "include")  # what is edited meanwhile does not count
        for mutant in filter(None, mutants):
            mutated(mutant, folder / "include")  # all of them fit, before the first is run
        for outcome in pool.map(lambda mutant: try_mutant(mutant, seeds, folder), mutants):
            outcomes.append(outcome)
            if progress:
                progress(outcome)
    return outcomes
