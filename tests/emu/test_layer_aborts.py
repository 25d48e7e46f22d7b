"""A launch that is abandoned in its middle, wherever that is: every rank ends."""

import functools
import threading
import time

import pytest
import torch
from cases.order import outcomes_of
from geometries import GEOMETRIES

import deep_moe
from deep_moe import _C, testing

COUNTS = (256, 100)
MIDDLES = [("ring", COUNTS, part, schedule) for part in (0.2, 0.4, 0.6, 0.8) for schedule in range(4)]
MIDDLES += [("wrap-8", (60, 40), part, 0) for part in (0.3, 0.6)]  # 8-row tiles


def world(name: str = "ring") -> testing.World:
    return testing.World(GEOMETRIES[name].problem(), 2, "cpu", num_sms=3)


@functools.cache
def call_seconds(name: str, counts: tuple[int, int]) -> float:
    timed = world(name)
    inputs = timed.inputs(counts)
    timed.call(inputs)
    start = time.perf_counter()
    timed.call(inputs)
    seconds = time.perf_counter() - start
    timed.close()
    return seconds


def replay(rank, y, times: int) -> None:
    """Launches that do not ask the host first, as those of a CUDA graph or of a busy stream."""
    plan = next(iter(rank.buffer.plans.values()))._plan
    for _ in range(times):
        options = rank.buffer._backend.options()
        plan.run(*options, y.data_ptr(), y.stride(0) * y.element_size(), y.shape[0], 0)


def launch_and_replay(rank, y) -> None:
    try:
        rank.mega(y)
    finally:
        replay(rank, y, 2)


@pytest.mark.parametrize("name, counts, part, schedule", MIDDLES)
def test_an_abort_in_the_middle(name, counts, part, schedule):
    """What an abandoned tile did not store is not announced: nobody takes what lies there (poison) for rows. What an
    abandoned launch has counted is not counted upon by those behind it."""
    seconds = part * call_seconds(name, counts)
    abandoned = world(name)
    abandoned.poison()
    inputs = abandoned.inputs(counts)
    record = _C.abort_record(_C.AbortCode.Timeout, _C.WaitSite.L1Done, 0, 7)

    def abort():
        # Not before the ranks launch: the replays are of the plans that they make for it.
        deadline = time.monotonic() + 60
        while not all(rank.buffer.plans for rank in abandoned.ranks) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(seconds)
        for rank in abandoned.ranks:
            rank.buffer._backend._abort.value = record

    thread = threading.Thread(target=abort)
    thread.start()
    # The host's store is a race.
    outcomes = outcomes_of(abandoned, inputs, launch_and_replay, seed=schedule, weak_memory=False)
    thread.join()
    assert all(outcome == "" or outcome.startswith("PeerTimeout: ") for outcome in outcomes)  # "": ended before


def test_launches_behind_an_abandoned_one_do_nothing():
    """Not even count: what the first one has counted lies where the next ones would count."""
    unusable = world()

    def launch(rank, y):
        if rank.group.rank() == 1:
            return  # never launches
        testing.poison(y)
        with pytest.raises(deep_moe.PeerTimeout):
            rank.mega(y)
        before, counted = y.clone(), rank.buffer.field("send_counts").clone()
        assert counted.any(), "this rank's CTAs have counted"
        replay(rank, y, 2)
        assert testing.same_bits(y, before)
        assert torch.equal(rank.buffer.field("send_counts"), counted)

    assert outcomes_of(unusable, unusable.inputs(COUNTS), launch)[0].startswith("PeerTimeout: ")


def test_a_launch_behind_an_abandoned_one_is_not_complete():
    """Though all arrivals are there, which the abandoned one may have had too: they are of the same epoch."""
    unusable = world()
    inputs = unusable.inputs([20, 30])

    def launch(rank, y):
        rank.mega(y)
        rank.group.barrier()
        testing.poison(y)
        before = y.clone()
        epoch = rank.buffer._header_word("epoch")
        rank.buffer.field("done_flags").fill_((int(epoch) + 1) << 32)
        rank.buffer._backend._abort.value = _C.abort_record(_C.AbortCode.Timeout, _C.WaitSite.DoneFlag, 0, 1)
        rank.group.barrier()
        replay(rank, y, 1)
        assert testing.same_bits(y, before) and int(epoch) == 1

    outcomes = outcomes_of(unusable, inputs, launch, weak_memory=False)
    assert all(outcome.startswith("PeerTimeout: ") for outcome in outcomes)
