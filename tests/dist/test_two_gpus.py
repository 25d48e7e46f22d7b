"""Two GPUs: two processes under torchrun, and eight ranks in one process dealt over both."""

import subprocess
import sys
from pathlib import Path

import pytest
from geometries import GEOMETRIES

from deep_moe import testing

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 240


@pytest.mark.parametrize("case", ["layers", "graphs", "mismatch", "bits"])
def test_two_processes(case):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{case}: ok") == 2


@pytest.fixture(scope="module", params=["main-8", "flash-8"])
def world(request):
    geometry = GEOMETRIES[request.param]
    problem = geometry.problem()
    weights = testing.random_weights(problem, device="cuda:0")
    with testing.World(problem, geometry.ranks, ["cuda:0", "cuda:1"], weights) as made:
        yield made


def test_eight_ranks_over_both_gpus(world):
    limit = world.problem.max_tokens_per_rank
    for seed, counts in enumerate([[limit] * 8, [0, 1, 7, 8, 31, 32, 33, 64], [0] * 7 + [limit]]):
        for pattern in (world.routing.random, world.routing.with_holes, world.routing.to_rank(7)):
            world.call_and_check(world.inputs(counts, pattern, seed=seed))


def test_same_bits_as_on_one_gpu(world):
    inputs = world.inputs([48] * 8)
    seen = world.call(inputs)
    with testing.World(world.problem, 8, "cuda:0", world.weights) as alone:
        for ours, theirs in zip(seen, alone.call(inputs), strict=True):
            assert testing.same_bits(ours.y, theirs.y)
