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


NS = [8, 16, 32, 64, 128, 256]


def both_forms(a, b, d, seed: int = 0, plant: int = 0):
    """D + A B^T with A from shared memory and from registers, and counts.

    a, b: uint8 [64, 128], [N, 128], codes of e4m3. d: float32 [64, N]. Returns (float32 [2, 64, N], counts).
    """
    n = b.shape[0]
    machine = hw_machine.Machine(1, 2 * 64 * n * 4)
    machine.fields = [("smem_a", 0, 8192), ("smem_b", 8192, 32768)]
    machine.weights = torch.cat([a, b])
    result = machine.outs[0].view(torch.float32).view(2, 64, n)
    result[:] = d
    counts = machine.launch(
        0,
        "registers",
        "registers",
        plant=plant,
        count=n,
        sms=1,
        threads=128,
        smem=8192 + 32768,
        options=hw_machine.options(seed),
    )
    return result, counts


def small_integers(n: int, seed: int):
    """Operands whose products and sums a tensor core keeps exactly: a, b as codes, and d."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randint(-4, 5, shape, generator=generator).float()  # noqa: E731
    a, b = (make(rows, 128).to(torch.float8_e4m3fn).view(torch.uint8) for rows in (64, n))
    return a, b, make(64, n)


def all_codes(n: int, seed: int):
    """Any codes, a quarter of them zeros and subnormals; NaN codes in row 5 of A and row 3 of B alone; and d."""
    generator = torch.Generator().manual_seed(seed)

    def codes(rows: int) -> torch.Tensor:
        c = torch.randint(0, 256, (rows, 128), generator=generator, dtype=torch.uint8)
        tiny = torch.rand(rows, 128, generator=generator) < 0.25
        c = torch.where(tiny, c & 0x87, c)
        return torch.where(c & 0x7F == 0x7F, c & 0xFE, c)

    a, b = codes(64), codes(n)
    a[5, 17], b[3, 126] = 0x7F, 0xFF
    return a, b, torch.randn(64, n, generator=generator) * 1e4


def product(a, b):
    return a.view(torch.float8_e4m3fn).double() @ b.view(torch.float8_e4m3fn).double().t()


@pytest.mark.parametrize("plant", [0, 1], ids=["add", "overwrite"])
@pytest.mark.parametrize("n", NS)
def test_a_from_registers_is_exact_where_sums_are(n, plant):
    a, b, d = small_integers(n, seed=n)
    got, counts = both_forms(a, b, d, plant=plant)
    want = product(a, b) + (0 if plant else d)
    assert torch.equal(got[0].double(), want) and torch.equal(got[1].double(), want)
    assert counts["wgmma"] == 2 * 4 and counts["macs"] == 2 * 64 * n * 128


@pytest.mark.parametrize("plant", [0, 1], ids=["add", "overwrite"])
@pytest.mark.parametrize("n", NS)
def test_both_forms_give_the_same_bits(n, plant):
    a, b, d = all_codes(n, seed=n)
    got, _ = both_forms(a, b, d, seed=n, plant=plant)
    assert torch.equal(got[0].view(torch.int32), got[1].view(torch.int32))
    nan = torch.zeros(64, n, dtype=torch.bool)
    nan[5], nan[:, 3] = True, True
    assert torch.equal(got[1].isnan(), nan)
    exact = (product(a, b) + (0 if plant else d))[~nan]
    assert not torch.equal(got[1][~nan].double(), exact)  # 14 bits do not hold these sums
    assert relative(got[1][~nan].double(), exact) < 1e-3


@pytest.mark.parametrize("schedule", range(10))
def test_writes_to_shared_memory_are_fenced_before_or_behind_the_barrier(schedule):
    a, b, d = small_integers(16, schedule)
    for plant in (0, 2):
        got, _ = both_forms(a, b, d, seed=schedule, plant=plant)
        assert torch.equal(got[1].double(), product(a, b) + d)


REGISTER_FAULTS = {
    3: "no fence_proxy_async_shared",
    4: "wgmma_fence",
    5: "without a wgmma_fence since registers of A were written",
    6: "registers of A were written while a wgmma in flight reads them",
    7: "warp 2 lane 13: registers of A were written while a wgmma in flight reads them",
    8: "divergence",
}


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("plant", REGISTER_FAULTS)
def test_register_faults(plant, schedule):
    with pytest.raises(errors.Protocol, match=REGISTER_FAULTS[plant]):
        both_forms(*small_integers(32, schedule), seed=schedule, plant=plant)
