"""CASES 15 and 17 on streams, and what a cached call costs the host."""

import time

import pytest
import torch

from deep_moe import testing

HOST_US = 15.0
CYCLES_PER_SECOND = 1_800_000_000


@pytest.mark.parametrize("name", ["main-1", "main-2", "main-8"])
def test_a_busy_second_stream(worlds, name):
    """17: matrix products keep every SM busy while the kernels start."""
    world = worlds(name)
    inputs = world.inputs([48] * world.num_ranks)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    busy = torch.cuda.Stream()
    for _ in range(3):
        world.poison()
        with torch.cuda.stream(busy):
            for _ in range(10):
                torch.mm(a, a)
        results = world.run(lambda rank: rank.call(inputs[rank.group.rank()]))
        torch.cuda.synchronize()
        world.check(inputs, results)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_behind_a_sleeping_kernel(worlds, late):
    """15: one rank's stream sleeps for about a second before its launch."""
    world = worlds("main-2")
    inputs = world.inputs([8, 30])

    def body(rank):
        if rank.group.rank() == late:
            torch.cuda._sleep(CYCLES_PER_SECOND)
        return rank.call(inputs[rank.group.rank()])

    world.poison()
    world.check(inputs, world.run(body))


def test_host_time_of_a_cached_call(worlds):
    world = worlds.alone("main-1")
    inputs = world.inputs([1])[0]

    def body(rank):
        y, stats = rank.new_y(inputs), rank.new_stats()
        rank.stage(rank.put(inputs))
        best = float("inf")
        for _ in range(10):
            rank.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                rank.mega(y, stats)
            best = min(best, (time.perf_counter() - start) / 50 * 1e6)
        rank.synchronize()
        return best, y.cpu()

    host_us, y = world.run(body)[0]
    testing.assert_close(world.problem, y, world.expected(inputs))
    assert host_us <= HOST_US, f"a cached call costs the host {host_us:.1f} µs"
