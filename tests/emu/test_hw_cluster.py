"""Clusters of CTAs: multicast, remote arrivals, sync_cluster, and the life of shared memory that others touch."""

import hw_machine
import pair_gemm
import pytest
import torch
from pair_gemm import KB

from deep_moe import _C, errors

PLANTS = {
    name: i
    for i, name in enumerate(
        "none three_dimensions no_empty_wait own_empty_only no_remote_arrive own_bytes no_start_sync no_end_sync "
        "early_arrive no_warp_sync no_full_wait".split()
    )
}
CASES = {
    name: i
    for i, name in enumerate(
        "ranks sync no_sync sync_after_ends sync_deadlock barrier_deadlock arrive_orders_no_writes arrive_after_end "
        "load_after_end load_during_end end_unordered no_such_cta load_nowhere load_beyond lands_apart".split()
    )
}


def run_pair_gemm(seed: int, plant: str = "none", sms: int = 4, **options):
    """(result float64 [sms * 64, 128], exact float64, counts)."""
    operands = pair_gemm.Operands(seed, sms)
    machine = hw_machine.Machine(1, sms * 64 * 128 * 4)
    machine.fields = [("smem_a", 0, 16384), ("smem_b", 16384, 32768), ("smem_sf", 49152, 256)]
    machine.fields.append(("smem_barriers", 49152 + 256, 32))
    machine.weights = operands.blob
    counts = machine.launch(
        0,
        "cluster",
        "pair_gemm",
        plant=PLANTS[plant],
        count=KB,
        maps=[
            _C.emu.encode_tensor_map(*spec)
            for spec in operands.maps(operands.blob.data_ptr(), plant == "three_dimensions")
        ],
        sms=sms,
        cluster=2,
        threads=pair_gemm.THREADS,
        smem=pair_gemm.SHARED_BYTES,
        options=hw_machine.options(seed, **options),
    )
    return machine.outs[0].view(torch.float32).view(-1, 128).double(), operands.exact, counts


@pytest.mark.parametrize("plant", ["none", "three_dimensions"])
@pytest.mark.parametrize("schedule", range(20))
def test_pairs_share_their_weights(schedule, plant):
    got, want, counts = run_pair_gemm(schedule, plant)
    assert (got - want).norm() < 1e-3 * want.norm()
    assert counts["tma_loads"] == 4 * 2 * KB  # a, and half of b
    assert counts["bulk_loads"] == 2 * KB  # one for each cluster
    assert counts["mbarrier_arrivals"] == 4 * KB * (1 + 8)


@pytest.mark.parametrize("mode", [{"async_effects": False}, {"weak_memory": False}], ids=str)
def test_pairs_in_the_simpler_modes(mode):
    got, want, _ = run_pair_gemm(1, **mode)
    assert (got - want).norm() < 1e-3 * want.norm()


GEMM_FAULTS = {
    "no_empty_wait": "race on|issued in phase|beyond the",
    "own_empty_only": r"race on CTA \d shared|issued in phase",  # the neighbour still reads its copy
    "own_bytes": "expected transaction count|than phase",
    "no_start_sync": r"smem_barriers\[\d\] of CTA \d is not ordered after its mbarrier_init|no initialised mbarrier",
    "no_end_sync": "is not ordered before that|has ended",
    "early_arrive": "race on.*wgmma",
    "no_warp_sync": "race on.*smem_sf",
    "no_full_wait": "asynchronous load",
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("plant", GEMM_FAULTS)
def test_pair_faults(plant, schedule):
    with pytest.raises(errors.Protocol, match=GEMM_FAULTS[plant]):
        run_pair_gemm(schedule, plant)


def test_a_missing_remote_arrival_is_a_deadlock():
    with pytest.raises(errors.Deadlock) as fault:
        run_pair_gemm(0, "no_remote_arrive", sms=2)
    text = str(fault.value)
    assert "pair_gemm CTA 0 (cluster of CTAs 0-1) warp 0 lanes 0: mbarrier_try_wait on smem_barriers[2]" in text
    assert "pending arrivals 4 of 8" in text


def facts(case: str, seed: int = 0, cluster: int = 2, sms: int = 4, **options) -> torch.Tensor:
    """int32 [sms, 64]: what the threads of tests/emu/kernels/cluster.cpp: cluster have stored."""
    machine = hw_machine.Machine(1, sms * 64 * 4)
    machine.fields = [("buffer", 0, 128), ("smem_barriers", 256, 16)]
    machine.launch(
        0,
        "cluster",
        "cluster",
        plant=CASES[case],
        sms=sms,
        cluster=cluster,
        smem=512,
        options=hw_machine.options(seed, **options),
    )
    return machine.outs[0].view(torch.int32).view(sms, 64)


def test_ranks():
    assert facts("ranks")[:, 0].tolist() == [0, 1, 0, 1] and facts("ranks", cluster=4)[:, 63].tolist() == [0, 1, 2, 3]
    assert facts("ranks", cluster=1)[:, 0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("schedule", range(10))
@pytest.mark.parametrize("case, lanes", [("sync", 32), ("sync_after_ends", 8)])
def test_sync_cluster_orders_the_ctas(schedule, case, lanes):
    """It waits for the threads that have not ended."""
    want = torch.tensor([1, 0, 3, 2])[:, None] * 1000 + torch.arange(lanes)
    assert torch.equal(facts(case, schedule)[:, :lanes], want.int())


def test_a_deadlock_report_names_the_pair():
    with pytest.raises(errors.Deadlock) as fault:
        facts("sync_deadlock")
    text = str(fault.value)
    assert "cluster CTA 3 (cluster of CTAs 2-3) warp 0: sync_cluster: 96 of 128 threads have arrived" in text
    assert "CTA 3 (cluster of CTAs 2-3) warp 1: polls rank 0 memory+0" in text
    with pytest.raises(errors.Deadlock, match=r"CTA 1 \(cluster of CTAs 0-1\) warp 0 lanes 0: .*1 of 2"):
        facts("barrier_deadlock", sms=2)


FAULTS = {
    "no_sync": "race on rank 0 memory",
    "arrive_orders_no_writes": r"race on rank 0 memory\+0.*CTA 1",  # it hands back what was read
    "arrive_after_end": r"mbarrier_arrive_cluster touches the shared memory of CTA 1 .*has ended",
    "load_after_end": r"bulk_load touches the shared memory of CTA 1 .*has ended",
    "load_during_end": r"copies in flight|the load on smem_barriers\[0\] by .* is not ordered before|has ended",
    "end_unordered": r"CTA 1 .* ends.*the arrival on smem_barriers\[1\] by rank 0 cluster CTA 0 warp 0 lane 0",
    "no_such_cta": "CTA rank 2 of a cluster of 2",
    "load_nowhere": "bulk_load into no CTA",
    "lands_apart": r"race on shared buffer\+0.*asynchronous load that completes on smem_barriers\[0\] of rank 0 CTA 1",
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("case", FAULTS)
def test_faults(case, schedule):
    with pytest.raises(errors.Protocol, match=FAULTS[case]):
        facts(case, schedule, sms=2)


@pytest.mark.parametrize("case", ["arrive_after_end", "load_after_end"])
def test_ended_shared_memory_is_a_fault_without_race_detection(case):
    with pytest.raises(errors.Protocol, match="has ended"):
        facts(case, sms=2, weak_memory=False)


def test_a_cta_alone_has_no_neighbour():
    with pytest.raises(errors.Protocol, match="CTA rank 1 of a cluster of 1"):
        facts("load_beyond", cluster=1)


def test_a_grid_has_whole_clusters():
    with pytest.raises(errors.Protocol, match="num_sms must be a multiple of cluster_size"):
        facts("ranks", sms=3)
    with pytest.raises(errors.Protocol, match="cluster_size must be in 1..8"):
        facts("ranks", cluster=16, sms=16)
