"""Bounds, deadlock reports, collectives, conversions and the clock of the emulator."""

import hw_machine
import pytest
import torch

from deep_moe import errors

CASES = {
    name: i
    for i, name in enumerate(
        "collectives store_beyond load_unknown write_read_only shared_cross shared_beyond misaligned barrier_as_data "
        "barrier_deadlock poll_deadlock lane_race lane_race_fixed exit_early timeout atomics registers convert "
        "block_deadlock unordered_init".split()
    )
}
FIELDS = [("first", 0, 128), ("second", 128, 128), ("smem_barriers", 256, 72)]


def run(case: str, seed: int = 0, ranks: int = 1, out_bytes: int = 4096, count: int = 1024, weights=None):
    machine = hw_machine.Machine(ranks, out_bytes)
    machine.region_bytes = 1024
    machine.fields = FIELDS
    if weights is not None:
        machine.weights = weights
    machine.each_rank(
        lambda rank: (
            machine.launch(
                rank, "small", "small", plant=CASES[case], count=count, smem=512, options=hw_machine.options(seed)
            )
            if case != "timeout" or rank == 0
            else None
        )
    )
    return machine


def test_collectives():
    out = run("collectives").outs[0].view(torch.int32)[: 64 * 9].view(64, 9).tolist()
    for t, (shfl, xor, up, ballot, every, half, permuted, bits, least) in enumerate(out):
        base, value = t // 32 * 32, t * 3 + 1
        assert shfl == (base + 5) * 3 + 1
        assert xor == (t ^ 2) * 3 + 1
        assert up == (value if t % 32 < 4 else (t - 4) * 3 + 1)
        assert ballot & 0xFFFFFFFF == sum(1 << i for i in range(32) if (base + i) % 3 == 0)
        assert every == (t < 32)
        assert torch.tensor(half, dtype=torch.int32).view(torch.float32).item() == (t ^ 1) * 0.5
        assert permuted & 0xFFFFFFFF == 0x77335511
        assert bits == bin(value).count("1") << 8 | ((value & -value).bit_length() - 1)
        assert least == min((i * 3 + 1) ^ 21 for i in range(base, base + 32)) << 1 | (t % 32 == 0)


def test_conversions_round_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    x = torch.cat(
        [
            codes,
            middle,
            middle * (1 + 2**-20),
            middle * (1 - 2**-20),
            torch.randn(2000) * 30,
            torch.randn(500) * 1e-3,
            torch.tensor([1e9, -1e9, 449.0, 463.9, 464.0, 1e-30, torch.inf]),
        ]
    )
    n = x.numel()
    machine = run("convert", out_bytes=4 * n + 16, count=n, weights=x)
    out = machine.outs[0][: 4 * n].view(torch.uint8)
    e4m3 = out[: 2 * n : 2].view(torch.float8_e4m3fn)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(e4m3.view(torch.uint8), want.view(torch.uint8))
    bf16 = out[2 * n :].view(torch.bfloat16)
    assert torch.equal(bf16, x.bfloat16())


OUT_OF_BOUNDS = {
    "store_beyond": "runs over the end of memory|the region before is memory",
    "load_unknown": "memory",
    "write_read_only": "weights",
    "shared_cross": "runs over the end of smem_barriers",
    "shared_beyond": "not in the CTA's 512 bytes",
}


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_out_of_bounds(case):
    with pytest.raises(errors.OutOfBounds, match=OUT_OF_BOUNDS[case]):
        run(case)


PROTOCOL = {
    "misaligned": "misaligned",
    "barrier_as_data": r"mbarrier smem_barriers\[0\] as data",
    "exit_early": "ended",
    "lane_race": "shared first.*not ordered",
    "unordered_init": "mbarrier",
}


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize("case", PROTOCOL)
def test_protocol(case, schedule):
    with pytest.raises(errors.Protocol, match=PROTOCOL[case]):
        run(case, schedule)


def test_warp_barrier_orders_lanes():
    out = run("lane_race_fixed").outs[0].view(torch.int32)[:32]
    assert torch.equal(out, (torch.arange(32, dtype=torch.int32) + 1) % 32 * 7)


def test_deadlock_report_names_the_barrier():
    with pytest.raises(errors.Deadlock) as fault:
        run("barrier_deadlock")
    text = str(fault.value)
    assert "mbarrier_try_wait on smem_barriers[1] parity 0" in text
    assert "pending arrivals 1 of 2" in text and "[Pipeline 0]" in text
    assert "rank 0 small CTA 1 warp 1" in text


def test_deadlock_report_names_the_poll():
    wanted = r"CTA 0 warp 0 lanes 0: polls rank 0 memory\+0, last seen 0 \[L1Done 12\]"
    with pytest.raises(errors.Deadlock, match=wanted):
        run("poll_deadlock")


def test_deadlock_report_names_the_collective():
    with pytest.raises(errors.Deadlock, match="sync_block: 32 of 64 threads have arrived"):
        run("block_deadlock")


def test_clock_jumps_when_a_rank_is_gone():
    assert run("timeout", ranks=2).outs[0].view(torch.int32)[0] == 99


def test_no_jump_while_all_ranks_are_there():
    with pytest.raises(errors.Deadlock, match="DoneFlag 1"):
        run("timeout", ranks=1)


@pytest.mark.parametrize("schedule", range(10))
def test_atomics(schedule):
    machine = run("atomics", schedule)
    words = machine.bytes_of(0)[:1024].view(torch.int32)
    assert words[0] == 128 and words[4] == 256 and machine.outs[0].view(torch.int32)[0] == 1


def test_worlds_stay_broken_after_a_fault():
    machine = hw_machine.Machine(1, 64)
    with pytest.raises(errors.OutOfBounds):
        machine.launch(0, "small", "small", plant=CASES["load_unknown"], count=1 << 20)
    with pytest.raises(errors.OutOfBounds):
        machine.launch(0, "small", "small", plant=CASES["collectives"])
