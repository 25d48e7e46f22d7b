"""A launch that is abandoned in its middle, wherever that is: every rank ends."""

import contextlib
import threading
import time

import pytest
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

    def body(rank):
        given = inputs[rank.group.rank()]
        try:
            rank.stage(rank.put(given))
            rank.mega(rank.new_y(given))
            rank.buffer.check_usable()
        except deep_moe.DeepMoeError as error:
            return type(error).__name__
        return "ended before"

    thread = threading.Thread(target=abort)
    thread.start()
    outcomes = abandoned.run(body, seed=schedule, weak_memory=False)  # the host's store is a race
    thread.join()
    assert set(outcomes) <= {"PeerTimeout", "ended before"}
    with contextlib.suppress(deep_moe.DeepMoeError):  # said once more on a rank that has not heard of it
        abandoned.close()
