"""A launch that is abandoned in its middle, wherever that is: every rank ends."""

import threading
import time

import pytest
from cases.order import outcomes_of
from geometries import GEOMETRIES

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


@pytest.mark.parametrize("part", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("schedule", range(4))
def test_an_abort_in_the_middle(call_seconds, part, schedule):
    """What an abandoned tile did not store is not announced: nobody takes what lies there (poison) for rows."""
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
    outcomes = outcomes_of(abandoned, inputs, lambda rank, y: rank.mega(y), seed=schedule, weak_memory=False)
    thread.join()
    assert all(outcome == "" or outcome.startswith("PeerTimeout: ") for outcome in outcomes)  # "": ended before
