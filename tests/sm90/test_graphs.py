"""CASES 7, 13, 14 and 27 with CUDA graphs: captured once, replayed with other inputs, counts and weights."""

import pytest
import torch

import deep_moe
from deep_moe import testing

ROWS = 64  # the fixed shape of a captured batch


class Captured:
    """One rank's graph of stage + layer over fixed tensors; `replay` fills them first."""

    def __init__(self, rank: testing.Rank, rows: int = ROWS, bound: int | None = None):
        problem, device = rank.problem, rank.device
        self.rank = rank
        self.x = torch.zeros(rows, problem.hidden, dtype=torch.bfloat16, device=device)
        self.idx = torch.full((rows, problem.num_topk), -1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(rows, problem.num_topk, device=device)
        self.count = torch.zeros((), dtype=torch.int32, device=device)
        self.y = testing.poison(torch.empty_like(self.x))
        self.stats = rank.new_stats()
        self.graph = torch.cuda.CUDAGraph()
        for turn in range(rank.group.size()):  # one capture at a time
            rank.group.barrier()
            if turn == rank.group.rank():
                self._capture(bound)
        rank.group.barrier()

    def _capture(self, bound: int | None) -> None:
        stream = torch.cuda.current_stream(self.rank.device)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.rank.stage((self.x, self.idx, self.weights, self.count))
            self.rank.mega(self.y, self.stats, bound)

    def replay(self, inputs: testing.RankInputs) -> torch.Tensor:
        """y [rows, H] on the CPU after one replay with these inputs; rows beyond them carry NaN and real ids."""
        batch = testing.padded(inputs, self.x.shape[0], expert=0)
        self.x.copy_(batch.x)
        self.idx.copy_(batch.topk_idx)
        self.weights.copy_(batch.topk_weights)
        self.count.fill_(batch.count)
        testing.poison(self.y)
        self.graph.replay()
        self.rank.synchronize()
        return self.y.cpu()


def check(world, inputs, seen) -> None:
    for rank, given in enumerate(inputs):
        n = given.num_tokens
        testing.assert_close(world.problem, seen[rank][:n], world.expected(given), f"rank {rank}")
        assert testing.is_poison(seen[rank][n:]).all()


@pytest.mark.parametrize("name", ["main-1", "main-2", "main-8"])
def test_replayed_100_times_with_eager_calls_in_between(worlds, name):
    """14, 7, 13: changed inputs and counts, statistics exact over all replays, same bits as the eager call."""
    world = worlds(name)
    steps = [
        world.inputs([(7 * rank + 13 * step) % (ROWS + 1) for rank in range(world.num_ranks)], seed=step)
        for step in range(100)
    ]

    def body(rank):
        me, captured, outputs = rank.group.rank(), Captured(rank), []
        for step, inputs in enumerate(steps):
            eager = rank.call(inputs[me]).y if step % 10 == 0 else None
            y = captured.replay(inputs[me])
            if eager is not None:
                assert testing.same_bits(y[: inputs[me].num_tokens], eager), f"step {step}: replay differs from eager"
            outputs.append(y)
        return outputs, captured.stats.cpu()

    world.poison()
    outputs, stats = zip(*world.run(body), strict=True)
    for step in range(0, 100, 7):
        check(world, steps[step], [of_rank[step] for of_rank in outputs])
    total = sum(world.expected_stats(inputs) for inputs in steps)
    assert torch.equal(torch.stack(stats), total.int())


def test_two_graphs_alternating(worlds):
    """14: two shapes, in different bound classes, on one buffer."""
    world = worlds("main-2")
    rows = (32, 256)
    steps = [world.inputs([(9 * i) % 33, (5 * i) % 33], seed=i) for i in range(20)]

    def body(rank):
        graphs = [Captured(rank, n, bound=n) for n in rows]
        return [graphs[i % 2].replay(inputs[rank.group.rank()]) for i, inputs in enumerate(steps)]

    outputs = world.run(body)
    for i, inputs in enumerate(steps):
        check(world, inputs, [of_rank[i] for of_rank in outputs])


def test_weights_reloaded_between_two_replays(worlds):
    """27."""
    world, fresh = worlds("main-1", weights_seed=11), worlds("main-1", weights_seed=12)
    inputs = world.inputs([ROWS])

    def body(rank):
        captured = Captured(rank)
        old = captured.replay(inputs[0])
        deep_moe.transform_weights(rank.problem, fresh.weights.gate_up, fresh.weights.down, out=(rank.l1, rank.l2))
        return old, captured.replay(inputs[0])

    old, new = world.run(body)[0]
    world.broken = True  # its weights are no longer those of its key
    check(world, inputs, [old])
    check(fresh, inputs, [new])


def test_staged_inputs_survive_a_call(worlds):
    """A graph of the layer alone, replayed ten times on inputs staged once, gives the same bits."""
    world = worlds("main-1")
    inputs = world.inputs([ROWS])[0]

    def body(rank):
        y = rank.new_y(inputs)
        rank.stage(rank.put(inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            rank.mega(y)
        seen = []
        for _ in range(10):
            testing.poison(y)
            graph.replay()
            seen.append(y.cpu())
        return seen

    seen = world.run(body)[0]
    assert all(testing.same_bits(y, seen[0]) for y in seen)
    check(world, [inputs], [seen[0]])
