"""The emulator's own bar: eight ranks under many seeded schedules, fast enough to be used."""

import time

import pytest

from deep_moe import testing

SECONDS_PER_SEED = 10.0


def eight_ranks(world, seed: int) -> tuple[list[testing.RankInputs], list[testing.RankResult], float]:
    """One call of 8 ranks x 64 tokens; inputs, results and CPU seconds.

    The emulator drives all ranks from one thread at a time, so on an idle machine they are also what the clock shows.
    """
    inputs = world.inputs([64] * 8, seed=0)
    world.poison()
    start = time.process_time()
    results = world.run(lambda rank: rank.call(inputs[rank.group.rank()]), seed=seed)
    return inputs, results, time.process_time() - start


def test_eight_ranks_within_ten_seconds(worlds):
    """8 ranks x 64 tokens, hidden 512, intermediate 256, 16 experts, top-4, 2 SMs per rank."""
    world = worlds("main-8")
    inputs, results, seconds = eight_ranks(world, seed=0)
    world.check(inputs, results)
    print(f"{seconds:.1f} s")
    assert seconds <= SECONDS_PER_SEED


def check_seeds(world, seeds) -> None:
    """No fault, and the same bits under every schedule."""
    first = None
    for seed in seeds:
        inputs, results, _ = eight_ranks(world, seed)
        first = first or world.check(inputs, results) and results
        for ours, theirs in zip(results, first, strict=True):
            assert testing.same_bits(ours.y, theirs.y), f"seed {seed}"


def test_a_few_schedules(worlds, pytestconfig):
    check_seeds(worlds("main-8"), range(1, 1 + pytestconfig.getoption("--seeds")))


@pytest.mark.extended
def test_twenty_schedules(worlds):
    check_seeds(worlds("main-8"), range(20))
