"""Model slices on one GPU: the error bars in both tile heights, all token counts, eight ranks on one GPU."""

import pytest
from cases.numbers import BARS, check_bars


@pytest.mark.parametrize("distribution", BARS)
@pytest.mark.parametrize("num_tokens", [64, 512, 1024])
def test_error_bars(worlds, distribution, num_tokens):
    world = worlds("7168x2048-large", distribution=distribution)
    inputs = world.inputs([num_tokens], distribution=distribution)
    for bound in {num_tokens, 1024}:
        check_bars(world, inputs, world.call(inputs, bound=bound), distribution)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 64, 65, 512, 2048, 8192])
@pytest.mark.parametrize("name", ["flash-1", "v3-1"])
def test_model_slices(worlds, name, num_tokens):
    world = worlds(name)
    world.call_and_check(world.inputs([num_tokens]), bound=num_tokens)


@pytest.mark.parametrize("counts", [[1] * 8, [64] * 8, [0, 1, 7, 8, 31, 200, 512, 1024]], ids=str)
def test_eight_ranks_on_one_gpu(worlds, counts):
    world = worlds("flash-8")
    for seed, pattern in enumerate([world.routing.random, world.routing.with_holes]):
        world.call_and_check(world.inputs(counts, pattern, seed=seed))
