"""Time whole layers: one row per shape and token count.

    python bench/mega.py                                        one GPU
    torchrun --nproc-per-node 2 bench/mega.py                   one rank per GPU
    python bench/mega.py --shapes flash,v3 --tokens 1,64,8192 --peers sgl,chain --json out.json --plot out.png

Every sample is one call with a cold L2 behind a sleeping kernel (timing.py); inputs are staged outside the timed span,
but for "stage": that is deep_moe.stage, which quantises bf16 tokens, and the layer, replayed from one CUDA graph.
One buffer with --max-tokens serves all rows, and num_tokens_bound is the class of the row's count. The result is
checked against `deep_moe.reference` before anything is timed; a wrong one ends the bench with status 1. Times are
medians, the slowest rank's. "floor" is max(weights / bandwidth, flops / peak, wire) with ceilings measured at the start
(roofline.py). "exp" are the experts whose weights the busiest rank reads; the inputs are drawn so that it is the
expected number (routing.py). "padded" is the work of the busiest rank: its experts' rows, each rounded up to 64 as
kernels do (those of 8-row tiles: to 8), over the real rows of the average rank. With --routing zipf the n-th most
popular expert is chosen in proportion to 1 / n, and a layer that is limited by the tensor cores should take as much
longer as "padded" grows.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import peers
import plot
import roofline
import torch
import torch.distributed as dist
from routing import Router, seed_of
from shapes import WEIGHT_BITS, Ceilings, Shape, busiest_touched, floor_us, shape_of
from timing import ColdTimer, Ranks, captured, host_us
from tracing import TracedLaunches

import deep_moe
from deep_moe import reference, testing
from deep_moe.config.arch import sm90

TOKENS = "0,1,8,16,32,64,128,256,512,1024,2048,4096,8192"
ERROR_BAR = {"zero-mean": 5e-3, "mean-0.3": 5e-3, "same-sign": 3e-3}
PEER_ERROR_BAR = 0.05  # zero-mean; a peer that is further off is timed, but marked
CHECKED_TOKENS = 64


@dataclass
class Inputs:
    """One rank's inputs of one row."""

    x: torch.Tensor  # bf16 [T, H]
    topk_idx: torch.Tensor  # i64 [T, K]
    topk_weights: torch.Tensor  # f32 [T, K]

    @classmethod
    def random(cls, problem, num_tokens: int, ranks: Ranks, distribution: str, routing: str) -> "Inputs":
        """Each number of tokens has inputs of its own; see routing.py for where the tokens go."""
        generator = testing.generator_of(seed_of(num_tokens, ranks.rank), ranks.device)
        x = testing.DISTRIBUTIONS[distribution].draw(
            num_tokens, problem.hidden, generator=generator, device=ranks.device
        )
        return cls(x.bfloat16(), *Router(problem, ranks, routing).typical(num_tokens))

    def staged(self, num_experts: int) -> reference.Staged:
        return reference.stage(self.x, self.topk_idx, self.topk_weights, num_experts)


@dataclass
class Truth:
    """What a spread of one rank's tokens must give."""

    at: torch.Tensor  # the tokens
    ref: torch.Tensor  # with the kernel's roundings
    exact: torch.Tensor  # float64, without requantisation

    @classmethod
    def of(cls, staged: reference.Staged, weights: testing.Weights, clamp: float | None) -> "Truth":
        count = staged.x.shape[0]
        at = torch.arange(count) if count <= CHECKED_TOKENS else torch.linspace(0, count - 1, CHECKED_TOKENS).long()
        at = at.to(staged.x.device)
        x = staged.x.view(torch.uint8)[at].view(staged.x.dtype)
        some = reference.Staged(x, *(part[at] for part in staged[1:]))
        operands = some, weights.gate_up, weights.down, reference.Activation(clamp=clamp)
        return cls(at, reference.layer(*operands), reference.exact_layer(*operands))

    def errors(self, y: torch.Tensor) -> dict[str, float]:
        """Relative Frobenius errors of y, and the reference's own."""
        return {
            "error": testing.error_of(y[self.at], self.ref).frobenius,
            "error_to_float64": testing.error_of(y[self.at], self.exact).frobenius,
            "reference_to_float64": testing.error_of(self.ref, self.exact).frobenius,
        }


def padded_work(topk_idx_of_ranks: list[torch.Tensor], num_experts: int, block_m: int) -> float:
    """Rows that the busiest rank multiplies in tiles of `block_m`, over the real rows of the average rank; 1 without
    rows. Those of an expert are rounded up to a whole tile, or to half a 128-row tile."""
    ids = torch.cat([idx.flatten() for idx in topk_idx_of_ranks])
    rows = torch.bincount(ids[ids >= 0], minlength=num_experts)
    step = min(block_m, sm90.HALF_TILE)
    filled = -(-rows // step) * step
    busiest = int(filled.view(len(topk_idx_of_ranks), -1).sum(1).max())
    return busiest * len(topk_idx_of_ranks) / int(rows.sum()) if rows.any() else 1.0


class Bench:
    """One shape: our buffer and weights, the peers', and the weights of all ranks for the reference."""

    def __init__(self, shape: Shape, ranks: Ranks, ceilings: Ceilings, args: argparse.Namespace) -> None:
        self.shape, self.ranks, self.ceilings, self.args = shape, ranks, ceilings, args
        self.problem = shape.problem(ranks.size, args.max_tokens)
        self.weights = testing.random_weights(self.problem, args.distribution, seed=0, device=ranks.device)
        own = self.weights.of_rank(ranks.rank, ranks.size)
        self.buffer = deep_moe.SymmBuffer(ranks.group, self.problem, num_sms=args.num_sms)
        self.l1, self.l2 = deep_moe.transform_weights(self.problem, own.gate_up, own.down)
        self.peers = self.load_peers(own)
        self.timer = ColdTimer(ranks)
        self.traced = TracedLaunches(self.problem, shape.op, ranks, args.num_sms, args.trace) if args.trace else None
        self.configs = dict(zip(self.problem.bound_classes(ranks.size), self.problem.configs(ranks.size), strict=True))

    def load_peers(self, own: testing.Weights) -> dict:
        """Those of --peers that run this shape on so many ranks; for the others, the reason is printed."""
        found = {}
        for name in self.args.peers:
            try:
                found[name] = peers.load(name)(self.shape, self.ranks, own, self.args.max_tokens)
            except peers.Unsupported as error:
                self.ranks.print(f"# peer {name} left out: {error}")
        return found

    def bound_of(self, num_tokens: int) -> int:
        """The class of `num_tokens`: the smallest published bound that holds it."""
        return next(bound for bound in self.configs if bound >= num_tokens)

    def row(self, num_tokens: int) -> dict:
        """Check and time one token count."""
        inputs = Inputs.random(self.problem, num_tokens, self.ranks, self.args.distribution, self.args.routing)
        staged = inputs.staged(self.problem.num_experts)
        bound = self.bound_of(num_tokens)
        y = torch.empty(num_tokens, self.shape.hidden, dtype=torch.bfloat16, device=self.ranks.device)
        rivals = {name: peer for name, peer in self.peers.items() if 0 < num_tokens <= peer.max_tokens}
        outputs = {name: torch.empty_like(y) for name in rivals}

        def call() -> None:
            self.shape.op(y, self.l1, self.l2, self.buffer, num_tokens_bound=bound)

        def stage() -> None:
            deep_moe.stage(self.buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)

        def stage_and_call() -> None:
            stage()
            call()

        def peer_call(name: str):
            return lambda: self.peers[name].call(outputs[name])

        stage()
        testing.poison(y)
        call()
        truth = Truth.of(staged, self.weights, self.shape.activation_clamp)
        errors = self.ranks.largest(truth.errors(y))
        for name, peer in rivals.items():
            peer.stage(staged)
            peer_call(name)()

        eager = y.clone()
        contenders = {"us": (call, None)}
        for name, body in (("graph_us", call), ("stage_us", stage_and_call)):
            contenders[name] = self.checked_graph(body, y, eager).replay, None
        contenders |= {name: (peer_call(name), lambda peer=peer: peer.stage(staged)) for name, peer in rivals.items()}
        times = self.timer.medians(contenders, self.args.repeats)
        host = self.ranks.max([host_us(call)])[0]
        if self.traced:
            self.traced.row(f"{self.shape.name}-{num_tokens}", inputs, (self.l1, self.l2), bound, self.timer)
        row = self.report(num_tokens, bound, inputs, times, errors, host)
        return row | {"peers": self.report_peers(times, truth, outputs)}

    def checked_graph(self, body: Callable[[], None], y: torch.Tensor, eager: torch.Tensor) -> torch.cuda.CUDAGraph:
        """A graph of `body`, whose replay must write the bits of `eager` to y."""
        graph = captured(body)
        testing.poison(y)
        graph.replay()
        if not testing.same_bits(y, eager):
            raise RuntimeError(f"{self.shape.name}, {len(y)} tokens: the replayed graph gives another result")
        return graph

    def report(self, num_tokens: int, bound: int, inputs: Inputs, times: dict, errors: dict, host: float) -> dict:
        """What is known of one row, in µs, TFLOPS per rank and GB/s."""
        ids = self.ranks.gather(inputs.topk_idx)
        touched = busiest_touched(ids, self.shape.experts_per_rank)
        us, size, shape = times["us"], self.ranks.size, self.shape
        floor = floor_us(shape, num_tokens, size, touched, self.ceilings)
        return {
            "shape": shape.name,
            "ranks": size,
            "tokens": num_tokens,
            "bound": bound,
            "block_m": self.configs[bound].block_m,
            "routing": self.args.routing,
            "touched": touched,
            "padded": padded_work(ids, self.problem.num_experts, self.configs[bound].block_m),
            "us": us,
            "graph_us": times["graph_us"],
            "stage_us": times["stage_us"],
            "host_us": host,
            "tflops": shape.flops(num_tokens) / us / 1e6,
            "weight_gbs": touched * shape.expert_bytes / us / 1e3,
            "nvlink_gbs": shape.wire_bytes(num_tokens, size) / us / 1e3,
            "floor_us": floor,
            "of_floor": floor / us,
            "error_bar": testing.error_bar(
                self.problem, min(num_tokens, CHECKED_TOKENS), ERROR_BAR[self.args.distribution]
            ),
            **errors,
        }

    def report_peers(self, times: dict, truth: Truth, outputs: dict[str, torch.Tensor]) -> dict[str, dict]:
        """The same of the peers, by what they wrote to `outputs`; one that runs a part of the layer checks itself."""

        def checked(peer, y: torch.Tensor) -> dict:
            if hasattr(peer, "part"):
                return {"part": peer.part, **self.ranks.largest({"part_error": peer.part_error()})}
            return {"error_to_float64": self.ranks.largest(truth.errors(y))["error_to_float64"]}

        return {
            name: {"us": times[name], "ratio": times["us"] / times[name], **checked(self.peers[name], y)}
            for name, y in outputs.items()
        }

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.buffer.destroy()
        if self.traced:
            self.traced.close()


HEADER = (
    f"{'shape':6} {'R':>2} {'T':>5} {'bound/bm':>9} {'exp':>3} {'padded':>6} {'us':>8} {'graph':>8} {'stage':>8} "
    f"{'host':>5} {'TFLOPS':>7} {'wGB/s':>6} {'nvGB/s':>6} {'floor':>7} {'part':>5} {'error':>8} {'to f64':>8}"
)


def line(row: dict) -> str:
    text = (
        f"{row['shape']:6} {row['ranks']:2} {row['tokens']:5} {row['bound']:5}/{row['block_m']:<3} {row['touched']:3} "
        f"{row['padded']:6.2f} {row['us']:8.1f} {row['graph_us']:8.1f} {row['stage_us']:8.1f} {row['host_us']:5.1f} "
        f"{row['tflops']:7.1f} {row['weight_gbs']:6.0f} {row['nvlink_gbs']:6.0f} {row['floor_us']:7.1f} "
        f"{row['of_floor']:5.2f} {row['error']:8.1e} {row['error_to_float64']:8.1e}"
    )
    for name, peer in row["peers"].items():
        error = peer["part_error" if "part" in peer else "error_to_float64"]
        far = "" if error < PEER_ERROR_BAR else " (!)"
        part = f", {peer['part']}," if "part" in peer else ""
        text += f" | {name}{part} {peer['us']:.1f} us, ratio {peer['ratio']:.2f}, to f64 {error:.1e}{far}"
    return text


def wrong(row: dict) -> bool:
    """The error bars of the project; a NaN is wrong too."""
    return not (row["error"] <= row["error_bar"] and row["error_to_float64"] <= 1.02 * row["reference_to_float64"])


def add_layer_options(parser: argparse.ArgumentParser, tokens: str, repeats: int) -> None:
    """What is run and how often; `tokens` and `repeats` are defaults."""
    parser.add_argument("--tokens", default=tokens, help="per rank (default %(default)s)")
    parser.add_argument("--mma-type", default="fp8xfp8", choices=list(WEIGHT_BITS), help="default %(default)s")
    parser.add_argument("--experts-per-rank", type=int, help="instead of the shape's own slice")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of every buffer (default %(default)s)")
    parser.add_argument("--distribution", default="zero-mean", choices=list(testing.DISTRIBUTIONS))
    parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf"], help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=repeats, help="samples per median (default %(default)s)")


def check_layer_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where an option makes no sense; args.tokens becomes a list."""
    args.tokens = [int(count) for count in args.tokens.split(",")]
    for name in ("max_tokens", "repeats", "num_sms", "experts_per_rank"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if not 0 <= min(args.tokens) <= max(args.tokens) <= args.max_tokens:
        parser.error(f"--tokens is {args.tokens}; it must be from 0 to --max-tokens {args.max_tokens}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="flash,v3", help="of flash, v3, pro (default %(default)s)")
    add_layer_options(parser, TOKENS, repeats=11)
    parser.add_argument("--num-sms", type=int, help="limit of the grid")
    parser.add_argument("--peers", default="", help="public competitors, of: " + ", ".join(peers.PEERS))
    parser.add_argument("--json", help="write all rows there")
    parser.add_argument("--trace", help="trace one more launch of each row, to NAME-SHAPE-TOKENS.json(.gz)")
    parser.add_argument("--plot", help="write a plot there (needs matplotlib)")
    args = parser.parse_args(argv)
    args.peers = [name for name in args.peers.split(",") if name]
    check_layer_options(parser, args)
    return args


def describe(bench: Bench, seconds: float) -> str:
    size = bench.problem.buffer_bytes(bench.ranks.size) / 2**20
    versions = ", ".join(peer.version for peer in bench.peers.values())
    return (
        f"# {bench.shape.name}: H {bench.shape.hidden} I {bench.shape.intermediate} top-{bench.shape.topk}, "
        f"{bench.shape.experts_per_rank} experts per rank, buffer {size:.0f} MiB, set up in {seconds:.1f} s"
        + (f"; {versions}" if versions else "")
    )


def run(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    """All rows, printed as they come; stops at the first wrong result."""
    ceilings = roofline.measure(ranks)
    ranks.print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, deep_moe {deep_moe.__version__}, "
        f"{args.distribution}, {args.routing} routing; ceilings {asdict(ceilings)}"
    )
    ranks.print(HEADER)
    rows: list[dict] = []
    for name in args.shapes.split(","):
        start = time.perf_counter()
        bench = Bench(shape_of(name, args.experts_per_rank, args.mma_type), ranks, ceilings, args)
        torch.cuda.synchronize()
        ranks.print(describe(bench, time.perf_counter() - start))
        for count in args.tokens:
            row = bench.row(count)
            ranks.print(line(row))
            rows.append(row)
            if wrong(row):
                ranks.print(f"WRONG: the error bar is {row['error_bar']:.1e}, and 1.02 x the reference's own error")
                return rows
        bench.close()
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    args, ranks = arguments(), Ranks()
    if ranks.size > 1:
        ranks.connect()
    rows = run(ranks, args)
    if ranks.rank == 0:
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "options": vars(args), "rows": rows}, file, indent=1)
        if args.plot and not plot.draw(rows, args.plot):
            print("no plot: matplotlib is not installed")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(wrong(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
