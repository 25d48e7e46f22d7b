"""The emulator's memory model: correct synchronisation passes under any seed, every planted fault is a fault."""

import hw_machine
import pytest
import torch

from deep_moe import errors

SEEDS = range(20)


def send_flags(seed: int, plant: int = 0, ranks: int = 4, rounds: int = 1) -> hw_machine.Machine:
    machine = hw_machine.Machine(ranks, ranks * 4096)

    def body(rank: int) -> None:
        for i in range(rounds):
            machine.launch(rank, "flags", "flags", plant=plant, count=i + 1, options=hw_machine.options(seed))

    machine.each_rank(body)
    return machine


@pytest.mark.parametrize("schedule", SEEDS)
def test_flags_arrive_with_their_payload(schedule):
    machine = send_flags(schedule)
    for rank in range(4):
        got = machine.outs[rank].view(torch.int32).view(4, 1024)
        want = torch.arange(4)[:, None] * 100000 + rank * 10000 + torch.arange(1024)
        assert torch.equal(got, want.int())


FLAG_FAULTS = {
    1: "ordered",  # release became relaxed
    2: "ordered",  # acquire became relaxed
    3: "ordered",  # no barrier between the payload's stores and the release of one thread
    4: "ordered",  # no barrier between the acquire of one thread and the others' loads
    5: "scopes",  # gpu scope between ranks
    6: "ordered",  # no wait at all
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("plant", FLAG_FAULTS)
def test_flag_faults(plant, schedule):
    with pytest.raises(errors.Protocol, match=FLAG_FAULTS[plant]):
        send_flags(schedule, plant)


def test_next_launch_without_exit_barrier_is_a_race():
    """A sender that overwrites a payload which its reader may still read."""
    with pytest.raises(errors.Protocol, match="race on rank"):
        send_flags(0, rounds=3)


def test_race_detection_can_be_switched_off():
    machine = hw_machine.Machine(2, 2 * 4096)
    machine.each_rank(
        lambda rank: machine.launch(
            rank, "flags", "flags", plant=2, count=1, options=hw_machine.options(3, weak_memory=False)
        )
    )
    got = machine.outs[1].view(torch.int32).view(2, 1024)
    assert torch.equal(got[0], torch.arange(1024, dtype=torch.int32) + 10000)


def pull_rows(seed: int, plant: int = 0) -> None:
    machine = hw_machine.Machine(2, 8192)
    machine.fields = [("row_buffers", 0, 256), ("smem_barriers", 512, 32), ("tile", 1024, 8192)]
    for rank in range(2):
        machine.bytes_of(rank)[:8192] = torch.randint(0, 256, (8192,), dtype=torch.uint8)

    def body(rank: int) -> None:
        tensor_map = hw_machine._C.emu.encode_tensor_map([128, 64], [128], [128, 64], machine.memory[rank] + 65536)
        machine.launch(
            rank,
            "pull",
            "pull_rows",
            plant=plant,
            count=64,
            maps=[tensor_map] * 2,
            threads=32,
            smem=1024 + 8192,
            options=hw_machine.options(seed),
        )

    machine.each_rank(body)
    for rank in range(2):
        assert torch.equal(machine.outs[rank], machine.bytes_of(1 - rank)[:8192])


CORRECT_PULLS = {0: "writer fences", 8: "reader fences", 10: "generic copy", 12: "smem fenced", 13: "smem fenced alone"}


@pytest.mark.parametrize("plant", CORRECT_PULLS, ids=CORRECT_PULLS.get)
@pytest.mark.parametrize("schedule", SEEDS)
def test_pulled_rows_reach_tma(schedule, plant):
    pull_rows(schedule, plant)


PULL_FAULTS = {
    1: "no fence_proxy_async",  # between the bulk store and another CTA's TMA
    2: "bulk store",  # released before the store was waited for
    3: "bulk store",  # never committed, so never waited for
    4: "bulk store",  # the source is overwritten while the store reads it
    5: "ordered",
    6: "ordered",
    7: "asynchronous load",  # stored before the load had arrived
    9: "no fence_proxy_async",  # generic stores read by TMA
    11: "no fence_proxy_async_shared",  # generic shared stores read by a bulk store
    14: "no fence_proxy_async ",  # the fence for shared memory, where global memory is handed on by its writer,
    15: "no fence_proxy_async ",  # taken over by its reader,
    16: "no fence_proxy_async ",  # or was written with generic stores
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("plant", PULL_FAULTS)
def test_pull_faults(plant, schedule):
    with pytest.raises(errors.Protocol, match=PULL_FAULTS[plant]):
        pull_rows(schedule, plant)
