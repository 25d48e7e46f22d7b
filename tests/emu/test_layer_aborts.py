"""A launch that is abandoned in its middle, wherever that is: every rank ends."""

import threading
import time

import pytest
from cases.order import outcomes_of
from geometries import GEOMETRIES

import deep_moe
from deep_moe import _C, testing

COUNTS = [256, 100]


def world() -> testing.World:
    return testing.World(GEOMETRIES["ring"].problem(), 2, "cpu", num_sms=3)


@pytest.fixture(scope="module")
def call_seconds():
    timed = world()
    inputs = timed.inputs(COUNTS)
    timed.call(inputs)
    start = time.perf_counter()
    timed.call(inputs)
    seconds = time.perf_counter() - start
    timed.close()
    return seconds


def launch_and_replay(rank, y):
    """Launches follow that do not ask the host first, as those of a CUDA graph or of a busy stream."""
    try:
        rank.mega(y)
    finally:
        plan = next(iter(rank.buffer.plans.values()))._plan
        for _ in range(2):
            options = rank.buffer._backend.options()
            plan.run(*options, y.data_ptr(), y.stride(0) * y.element_size(), y.shape[0], 0)


@pytest.mark.parametrize("part", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("schedule", range(4))
def test_an_abort_in_the_middle(call_seconds, part, schedule):
    """What an abandoned tile did not store is not announced: nobody takes what lies there (poison) for rows. And what an
    abandoned launch has counted is not counted upon by those behind it."""
    abandoned = world()
    abandoned.poison()
    inputs = abandoned.inputs(COUNTS)
    record = _C.abort_record(_C.AbortCode.Timeout, _C.WaitSite.L1Done, 0, 7)

    def abort():
        time.sleep(part * call_seconds)
        for rank in abandoned.ranks:
            rank.buffer._backend._abort.value = record

    thread = threading.Thread(target=abort)
    thread.start()
    # The host's store is a race.
    outcomes = outcomes_of(abandoned, inputs, launch_and_replay, seed=schedule, weak_memory=False)
    thread.join()
    assert all(outcome == "" or outcome.startswith("PeerTimeout: ") for outcome in outcomes)  # "": ended before


def test_a_launch_behind_an_abandoned_one_writes_nothing():
    unusable = world()
    inputs = unusable.inputs([20, 30])

    def launch(rank, y):
        rank.mega(y)  # well
        testing.poison(y)
        rank.buffer._backend._abort.value = _C.abort_record(_C.AbortCode.Timeout, _C.WaitSite.L1Done, 0, 7)
        before = y.clone()
        with pytest.raises(deep_moe.PeerTimeout):
            launch_and_replay(rank, y)
        assert testing.same_bits(y, before)

    outcomes = outcomes_of(unusable, inputs, launch, weak_memory=False)
    assert all(outcome.startswith("PeerTimeout: ") for outcome in outcomes)
