"""TMA, mbarriers and wgmma: a two-stage GEMM that must be right, and its planted faults."""

import hw_machine
import pytest
import torch

from deep_moe import _C, errors

K = 1024


def operands(seed: int, same_sign: bool, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    make = torch.rand if same_sign else torch.randn
    shift = 0.1 if same_sign else 0.0
    return tuple((make(n, k, generator=generator) + shift).to(torch.float8_e4m3fn) for n in (64, 128))


def gemm(seed: int, plant: int = 0, same_sign: bool = False, k: int = K, **options):
    """(result float64 [64, 128], exact float64 [64, 128], counts)."""
    a, b = operands(seed, same_sign, k)
    machine = hw_machine.Machine(1, 64 * 128 * 4)
    machine.fields = [("smem_a", 0, 16384), ("smem_b", 16384, 32768), ("smem_barriers", 49152, 32)]
    machine.weights = torch.cat([a, b]).view(torch.uint8)
    maps = [
        _C.emu.encode_tensor_map([k, 64], [k], [128, 64], machine.weights.data_ptr(), "a"),
        _C.emu.encode_tensor_map([k, 128], [k], [128, 128], machine.weights.data_ptr() + 64 * k, "b"),
    ]
    counts = machine.launch(
        0,
        "gemm",
        "gemm",
        plant=plant,
        count=k // 128,
        maps=maps,
        sms=1,
        threads=256,
        smem=49152 + 1024,
        options=hw_machine.options(seed, **options),
    )
    exact = a.double() @ b.double().t()
    return machine.outs[0].view(torch.float32).view(64, 128).double(), exact, counts


def relative(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("schedule", range(20))
def test_gemm(schedule):
    got, want, counts = gemm(schedule)
    assert relative(got, want) < 1.2e-3
    assert counts["wgmma"] == K // 32 and counts["tma_loads"] == 2 * K // 128
    assert counts["mbarrier_arrivals"] == K // 128 * 5
    assert counts["macs"] == 64 * 128 * K


def test_gemm_without_async_effects():
    got, want, _ = gemm(1, async_effects=False)
    assert relative(got, want) < 1.2e-3


def test_same_seed_same_run():
    first, second = gemm(7)[2], gemm(7)[2]
    assert first == second and first["switches"] != gemm(8)[2]["switches"]


# Relative error measured on an H200, and how far the model may be from it.
@pytest.mark.parametrize(
    ("k", "same_sign", "measured"),
    [
        (512, False, 3.4e-4),
        (2048, False, 8.5e-4),
        (7168, False, 1.9e-3),
        (512, True, 5.4e-3),
        (2048, True, 3.3e-2),
        (7168, True, 1.3e-1),
    ],
)
def test_accumulation_is_as_coarse_as_on_the_gpu(k, same_sign, measured):
    got, want, _ = gemm(3, same_sign=same_sign, k=k)
    assert measured * 0.85 < relative(got, want) < measured * 1.15


@pytest.mark.parametrize(("same_sign", "measured"), [(False, 1.3e-4), (True, 4.3e-4)])
def test_promoted_partials_are_accurate(same_sign, measured):
    got, want, _ = gemm(3, plant=16, same_sign=same_sign, k=2048)
    assert measured * 0.85 < relative(got, want) < measured * 1.15


GEMM_FAULTS = {
    1: (errors.Protocol, "transaction count (is|was) too small"),
    2: (errors.Deadlock, r"pending bytes 16"),
    3: (errors.Protocol, "race on shared smem_[ab]|beyond the"),  # a stage reused without waiting for it
    5: (errors.Protocol, "wgmma_fence"),
    7: (errors.Protocol, "fence_mbarrier_init"),
    8: (errors.Protocol, "race on shared smem_[ab]"),  # the stage handed back before wgmma_wait
    9: (errors.Protocol, "asynchronous load|wgmma in flight"),
    10: (errors.Protocol, "wgmma read"),  # only one warp says that it is done
    11: (errors.EmulatorFault, "."),
    12: (errors.Protocol, "beyond the 4|race on shared"),
    13: (errors.Protocol, "divergence"),
    14: (errors.Protocol, "descriptor of A"),
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("plant", GEMM_FAULTS)
def test_gemm_faults(plant, schedule):
    kind, text = GEMM_FAULTS[plant]
    with pytest.raises(kind, match=text):
        gemm(schedule, plant)


@pytest.mark.parametrize("plant", [4, 6, 15], ids=["no wait", "no commit", "read early"])
def test_accumulators_are_nan_until_waited_for(plant):
    try:
        got, _, _ = gemm(2, plant)
    except errors.EmulatorFault:
        return  # with no wait the stages are never safe to reuse either
    assert not torch.isfinite(got).all()
