"""One process of `torchrun --nproc-per-node 2 worker.py CASE`; prints "CASE: ok" when it is right."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # tests, and a checkout's root

from geometries import GEOMETRIES  # noqa: E402

import deep_moe  # noqa: E402
from deep_moe import testing  # noqa: E402
from deep_moe.testing import Routing  # noqa: E402


class Process(testing.Rank):
    """This process's rank of one geometry, and the weights of all."""

    def __init__(self, name: str):
        problem = GEOMETRIES[name].problem()
        self.weights = testing.random_weights(problem, device="cuda")
        super().__init__(dist.group.WORLD, problem, self.weights, None)
        self.routing = Routing.of(problem, self.group.size())

    def inputs(self, counts, pattern, seed: int) -> testing.RankInputs:
        """This rank's part; every rank draws from its own seed."""
        me = self.group.rank()
        return testing.random_inputs(self.problem, counts[me], pattern, rank=me, seed=seed)

    def check(self, inputs: testing.RankInputs, y: torch.Tensor) -> None:
        n = inputs.num_tokens
        testing.assert_close(self.problem, y[:n].cpu(), testing.expected(self.problem, self.weights, inputs))
        assert testing.is_poison(y[n:]).all()


def layers() -> None:
    """Random, lopsided and empty batches; then five layers back to back without a sync."""
    for name in ("main-2", "small", "ring"):
        rank = Process(name)
        limit = rank.problem.max_tokens_per_rank
        patterns = [rank.routing.random, rank.routing.with_holes, rank.routing.to_rank(1), rank.routing.nobody]
        for seed, counts in enumerate([(limit, limit), (0, limit), (33, 0), (0, 0), (8, 65)]):
            batches = [rank.inputs(counts, pattern, seed) for pattern in patterns]
            for inputs in batches:
                rank.check(inputs, rank.call(inputs).y)
            outputs = [rank.new_y(inputs) for inputs in batches]
            for inputs, y in zip(batches, outputs, strict=True):
                rank.stage(rank.put(inputs))
                rank.mega(y)
            rank.synchronize()
            for inputs, y in zip(batches, outputs, strict=True):
                rank.check(inputs, y)
        rank.buffer.destroy()


def graphs() -> None:
    """One graph of stage + layer, replayed with other inputs, with eager calls in between."""
    rank = Process("main-2")
    first = rank.inputs((64, 64), rank.routing.random, 0)
    x, idx, weights, _ = rank.put(first)
    y = rank.new_y(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank.stage((x, idx, weights, None))
        rank.mega(y)
    for seed in range(30):
        inputs = rank.inputs((64, 64), rank.routing.with_holes, seed)
        for static, fresh in zip((x, idx, weights), rank.put(inputs)[:3], strict=True):
            static.copy_(fresh)
        testing.poison(y)
        graph.replay()
        torch.cuda.synchronize()
        rank.check(inputs, y)
        if seed % 5 == 0:
            assert testing.same_bits(rank.call(inputs).y, y)
    rank.buffer.destroy()


def mismatch() -> None:
    """Ranks that disagree get the same error, and the next buffer is fine."""
    geometry = GEOMETRIES["main-2"]
    problem = geometry.problem()
    other = deep_moe.Problem(**(problem.facts() | {"max_tokens_per_rank": 100}))
    try:
        deep_moe.SymmBuffer(dist.group.WORLD, other if dist.get_rank() else problem)
    except deep_moe.MismatchError as error:
        messages = [None, None]
        dist.all_gather_object(messages, str(error))
        assert messages[0] == messages[1] and "max_tokens_per_rank" in messages[0], messages
    else:
        raise AssertionError("no MismatchError")
    deep_moe.SymmBuffer(dist.group.WORLD, problem).destroy()


def bits() -> None:
    """Two processes give the same bits as one rank alone."""
    rank = Process("main-2")
    inputs = rank.inputs((64, 64), rank.routing.random, 3)
    y = rank.call(inputs).y
    problem = GEOMETRIES["main-1"].problem()
    with testing.World(problem, 1, f"cuda:{dist.get_rank()}", rank.weights) as alone:
        assert testing.same_bits(alone.call([inputs])[0].y, y)
    rank.buffer.destroy()


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    case = sys.argv[1]
    {"layers": layers, "graphs": graphs, "mismatch": mismatch, "bits": bits}[case]()
    dist.barrier()
    print(f"{case}: ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
