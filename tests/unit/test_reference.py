"""deep_moe.reference against an independent computation: numpy float64, one token at a time, nothing shared."""

import numpy as np
import pytest
import torch

from deep_moe import reference


def e4m3_values() -> np.ndarray:
    """All 256 codes decoded by hand: 1.4.3 bits, bias 7, no infinity, 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where((codes & 127) == 127, np.nan, np.where(sign, -magnitude, magnitude))


E4M3 = e4m3_values()


def round_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3 value, ties to the even code, saturating at 448; NaN stays."""
    table = E4M3[:127]  # code order is value order
    magnitude = np.minimum(np.abs(values), 448.0)
    above = np.clip(np.searchsorted(table, magnitude), 1, 126)
    low, high = table[above - 1], table[above]
    up = (high - magnitude < magnitude - low) | ((high - magnitude == magnitude - low) & (above % 2 == 0))
    rounded = np.copysign(np.where(up, high, low), values)
    return np.where(np.isnan(values), np.nan, rounded)


def quantise(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row of float32, groups of 128, in float32 arithmetic: dequantised codes and scales, float64."""
    codes, scales = [], []
    for start in range(0, row.size, 128):
        group = row[start : start + 128].astype(np.float32)
        amax = np.maximum(np.nanmax(np.abs(group)), np.float32(1e-10))
        with np.errstate(over="ignore"):
            codes.append(round_e4m3((group * (np.float32(448) / amax)).astype(np.float64)))
        scales.append(float(amax / np.float32(448)))
    return np.concatenate(codes), np.array(scales)


def expand(q: torch.Tensor, sf: torch.Tensor) -> np.ndarray:
    """A [N, K] weight in float64."""
    codes = E4M3[q.view(torch.uint8).numpy()]
    scales = np.repeat(np.repeat(sf.double().numpy(), 128, 0), 128, 1)
    return codes * scales[: codes.shape[0], : codes.shape[1]]


def activated(gate, up, activation):
    if activation.clamp is not None:
        gate, up = np.minimum(gate, activation.clamp), np.clip(up, -activation.clamp, activation.clamp)
    if activation.kind == "swigluoai":
        return gate / (1 + np.exp(-activation.alpha * gate)) * (up + 1)
    return gate / (1 + np.exp(-gate)) * up


def token_by_hand(x, idx, weights, gate, up, down, activation, biases, requantise):
    """One token through its experts in ascending slot order, everything in float64 but the stated roundings.

    biases: None, or float64 [E, ...] of gate, up and down.
    """
    codes, scales = x
    row = codes * np.repeat(scales, 128)[: codes.size]
    total = np.zeros(row.size)
    for expert, weight in zip(idx, weights, strict=True):
        if expert < 0:
            continue
        g, u = gate[expert] @ row, up[expert] @ row
        if biases:
            g, u = g + biases[0][expert], u + biases[1][expert]
        act = activated(g, u, activation) * float(weight)
        if requantise:
            q, sf = quantise(act)
            act = q * np.repeat(sf, 128)[: q.size]
        slot = down[expert] @ act
        if biases:
            slot = slot + float(weight) * biases[2][expert]
        if requantise:
            slot = torch.tensor(slot).float().bfloat16().double().numpy()
        total = total + slot
    return total


def make_weights(experts, n, k, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    return reference.quantize_blocks(torch.randn(experts, n, k, generator=generator) * scale)


def make_biases(hidden, intermediate, experts):
    generator = torch.Generator().manual_seed(7)
    sizes = intermediate, intermediate, hidden
    return reference.Biases(*(torch.randn(experts, size, generator=generator).bfloat16() for size in sizes))


def make_layer(hidden, intermediate, experts, topk, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    idx = torch.randint(-1, experts, (tokens, topk), generator=generator)
    weights = torch.rand(tokens, topk, generator=generator) - 0.25
    gate = make_weights(experts, intermediate, hidden, seed + 1, hidden**-0.5)
    up = make_weights(experts, intermediate, hidden, seed + 2, hidden**-0.5)
    down = make_weights(experts, hidden, intermediate, seed + 3, intermediate**-0.5)
    return reference.stage(x, idx, weights, experts), (gate, up), down


# ---- quantisation ---------------------------------------------------------------------------------------------------


def test_e4m3_rounding_is_bit_exact():
    """Every code, every midpoint between codes, and its float32 neighbours."""
    table = E4M3[:127].astype(np.float32)
    middles = (table[1:] + table[:-1]) / 2
    values = np.concatenate([table, middles, np.nextafter(middles, middles - 1), np.nextafter(middles, middles + 1)])
    assert values.dtype == np.float32
    values = np.concatenate([values, -values])
    rows = torch.stack([torch.full((values.size,), 448.0), torch.from_numpy(values)], 1)  # 448 pins the scale to 1
    q, sf = reference.quantize_rows(rows)
    assert (sf == 1).all()
    assert np.array_equal(E4M3[q[:, 1].view(torch.uint8).numpy()], round_e4m3(values.astype(np.float64)))


@pytest.mark.parametrize("exponent", [-30, -9, -1, 0, 1, 8, 60])
def test_amax_of_exactly_448_times_a_power_of_two_is_exact(exponent):
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() * 2.0**exponent
    q, sf = reference.quantize_rows(values[None])
    assert sf.item() == 2.0**exponent
    assert torch.equal(q.view(torch.uint8)[0], codes)
    assert torch.equal(reference.dequantize_rows(q, sf)[0], values)


@pytest.mark.parametrize("columns", [16, 64, 128, 130, 512, 2880])
def test_quantize_rows_equals_the_hand_computation(columns):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=generator) * torch.logspace(-12, 12, 9)[:, None]
    q, sf = reference.quantize_rows(x.bfloat16())
    assert q.shape == x.shape and sf.shape == (9, -(-columns // 128))
    for row in range(9):
        codes, scales = quantise(x[row].bfloat16().float().numpy())
        assert np.array_equal(E4M3[q[row].view(torch.uint8).numpy()], codes)
        assert np.array_equal(sf[row].double().numpy(), scales)


def test_zero_huge_and_subnormal_groups():
    x = torch.zeros(3, 256)
    x[1, 5], x[1, 6] = 3e38, 1e30  # one huge element flushes its neighbours, not the next group
    x[1, 200] = 1.0
    x[2, 0] = 1e-38  # far below the floor of amax
    q, sf = reference.quantize_rows(x.bfloat16())
    assert (q[0].float() == 0).all() and torch.equal(sf[0], torch.full((2,), 1e-10) / torch.full((2,), 448.0))
    assert q[1, 5].float() == 448 and q[1, 6].float() == 0 and q[1, 200].float() == 448
    assert (q[2].float() == 0).all() and sf.isfinite().all()


def test_nan_stays_in_its_element_and_inf_in_its_group():
    x = torch.ones(2, 256)
    x[0, 3], x[1, 3] = float("nan"), float("inf")
    q, sf = reference.quantize_rows(x)
    assert q[0].float().isnan().nonzero().tolist() == [[3]] and sf[0].isfinite().all()
    assert sf[1].isinf().tolist() == [True, False] and q[1, 128:].float().isfinite().all()


@pytest.mark.parametrize("n, k", [(128, 128), (256, 512), (192, 64), (80, 320)])
def test_quantize_blocks_round_trip(n, k):
    w = torch.randn(2, n, k, generator=torch.Generator().manual_seed(n))
    w[0, :64, :64] *= 1000
    q, sf = reference.quantize_blocks(w)
    assert sf.shape == (2, -(-n // 128), -(-k // 128))
    back = reference.dequantize_blocks(q, sf, torch.float64)
    assert np.array_equal(back[0].numpy(), expand(q[0], sf[0]))
    spread = sf.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n, :k]
    assert ((back - w).abs() <= w.abs() / 16 + spread * 2**-10).all()


# ---- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden, intermediate, experts, topk", [(256, 128, 4, 2), (64, 80, 3, 4), (320, 192, 8, 1)])
@pytest.mark.parametrize(
    "activation",
    [
        reference.Activation(),
        reference.Activation(clamp=0.5),
        reference.Activation("swigluoai", clamp=7.0, alpha=1.702),
        reference.Activation("swigluoai", clamp=0.5, alpha=3.0),
    ],
    ids=lambda a: f"{a.kind}-{a.clamp}",
)
@pytest.mark.parametrize("has_biases", [False, True], ids=["plain", "biases"])
def test_layer_equals_the_hand_computation(hidden, intermediate, experts, topk, activation, has_biases):
    staged, (gate, up), down = make_layer(hidden, intermediate, experts, topk, tokens=12)
    gates, ups, downs = ([expand(q[e], sf[e]) for e in range(experts)] for q, sf in (gate, up, down))
    biases = make_biases(hidden, intermediate, experts) if has_biases else None
    ours = reference.layer(staged, (gate, up), down, activation, biases).double().numpy()
    exact = reference.exact_layer(staged, (gate, up), down, activation, biases).numpy()
    by_hand_biases = biases and [bias.double().numpy() for bias in biases]
    for token in range(12):
        x = E4M3[staged.x[token].view(torch.uint8).numpy()], staged.x_sf[token].double().numpy()
        routing = staged.topk_idx[token].tolist(), staged.topk_weights[token].tolist()
        args = x, *routing, gates, ups, downs, activation, by_hand_biases
        np.testing.assert_allclose(exact[token], token_by_hand(*args, requantise=False), rtol=1e-12, atol=1e-13)
        by_hand = token_by_hand(*args, requantise=True)
        # bf16 result; an fp32 sum may fall on the other side of an e4m3 or bf16 rounding border now and then.
        assert np.linalg.norm(ours[token] - by_hand) <= 4e-3 * np.linalg.norm(by_hand) + 1e-12


def test_requantisation_is_the_only_large_error():
    staged, gate_up, down = make_layer(512, 256, 4, 2, tokens=64)
    ours, exact = reference.layer(staged, gate_up, down).double(), reference.exact_layer(staged, gate_up, down)
    assert 0.01 < float((ours - exact).norm() / exact.norm()) < 0.035


def test_fused_and_separate_gate_up_agree():
    staged, (gate, up), down = make_layer(256, 256, 4, 2, tokens=8)
    fused = torch.cat([gate[0].view(torch.uint8), up[0].view(torch.uint8)], 1).view(gate[0].dtype)
    fused = fused, torch.cat([gate[1], up[1]], 1)
    assert torch.equal(reference.layer(staged, fused, down), reference.layer(staged, (gate, up), down))
    odd = make_weights(4, 2 * 80, 256, 0, 1.0)
    with pytest.raises(ValueError, match="intermediate 80.*apart"):
        reference.split_gate_up(odd)


def test_a_token_without_experts_is_zero_and_minus_one_is_skipped():
    staged, gate_up, down = make_layer(256, 128, 4, 4, tokens=4)
    idx = torch.tensor([[-1, -1, -1, -1], [0, -1, 2, 3], [0, 2, 3, -1], [0, 2, 3, -1]], dtype=torch.int32)
    weights = torch.rand(4, 4)
    weights[2] = weights[1, [0, 2, 3, 1]]
    weights[3] = weights[2]
    weights[3, 3] = float("nan")  # weight of a masked slot
    x = torch.cat([staged.x.view(torch.uint8)[:1], staged.x.view(torch.uint8)[1:2].expand(3, -1)]).view(staged.x.dtype)
    y = reference.layer(reference.Staged(x, staged.x_sf[[0, 1, 1, 1]], idx, weights), gate_up, down)
    assert (y[0] == 0).all()
    assert torch.equal(y[1], y[2]) and torch.equal(y[2], y[3])


def test_slots_are_summed_in_ascending_order():
    """Large, -large, small: only the order 0, 1, 2 keeps the small one."""
    staged, gate_up, down = make_layer(128, 128, 1, 3, tokens=1)
    idx = torch.zeros(1, 3, dtype=torch.int32)

    def run(*weights):
        return reference.layer(staged._replace(topk_idx=idx, topk_weights=torch.tensor([weights])), gate_up, down)

    assert torch.equal(run(1e12, -1e12, 1.0), run(0.0, 0.0, 1.0))
    assert not torch.equal(run(1.0, 1e12, -1e12), run(0.0, 0.0, 1.0))


def test_duplicates_are_separate_slots():
    staged, gate_up, down = make_layer(128, 128, 2, 2, tokens=3)
    idx, weights = torch.ones(3, 2, dtype=torch.int32), torch.full((3, 2), 0.5)
    twice = reference.layer(staged._replace(topk_idx=idx, topk_weights=weights), gate_up, down)
    once = reference.layer(staged._replace(topk_idx=idx[:, :1], topk_weights=weights[:, :1]), gate_up, down)
    assert torch.equal(twice.float(), 2 * once.float())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_in_one_token_touches_no_other(poison):
    staged, gate_up, down = make_layer(256, 128, 2, 2, tokens=6)
    idx = torch.tensor([[0, 1]] * 6, dtype=torch.int32)
    clean = reference.layer(staged._replace(topk_idx=idx), gate_up, down)
    x = reference.dequantize_rows(staged.x, staged.x_sf)
    x[2, 7] = poison
    q, sf = reference.quantize_rows(x)
    q, sf = q.view(torch.uint8), sf.clone()
    others = [0, 1, 3, 4, 5]
    q[others], sf[others] = staged.x.view(torch.uint8)[others], staged.x_sf[others]
    y = reference.layer(staged._replace(x=q.view(staged.x.dtype), x_sf=sf, topk_idx=idx), gate_up, down)
    assert torch.equal(y[others], clean[others])
    assert y[2].isnan().all()


def test_clamp_limits_gate_from_above_and_up_on_both_sides():
    hidden, intermediate = 128, 128
    staged = reference.stage(torch.ones(1, hidden).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1), 1)

    def constant(value):
        return reference.quantize_blocks(torch.full((1, intermediate, hidden), value / hidden))

    eye = reference.quantize_blocks(torch.eye(hidden)[None])
    clamped = reference.Activation(clamp=2)
    for gate, up, seen_gate, seen_up in [(9, 9, 2, 2), (-9, -9, -9, -2), (1, 0.5, 1, 0.5)]:
        expected = seen_gate / (1 + np.exp(-seen_gate)) * seen_up
        y = reference.exact_layer(staged, (constant(gate), constant(up)), eye, activation=clamped)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)
        y = reference.layer(staged, (constant(gate), constant(up)), eye, activation=clamped)
        np.testing.assert_allclose(y.double().numpy(), expected, rtol=2**-8)


def test_swigluoai_at_values_worked_out_by_hand():
    """gate 9 is limited to 7 and up -9 to -7; the sigmoid of alpha * gate; up + 1."""
    oai = reference.Activation("swigluoai", clamp=7.0, alpha=1.702)
    gate, up = torch.tensor([9.0, 0.0, 1.0, -20.0]).double(), torch.tensor([-9.0, 5.0, -1.0, 30.0]).double()
    expected = [7 / (1 + np.exp(-1.702 * 7)) * -6, 0, 0, -20 / (1 + np.exp(1.702 * 20)) * 8]
    np.testing.assert_allclose(oai(gate, up).numpy(), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="activation is 'gelu'; the reference knows 'swiglu' and 'swigluoai'"):
        reference.Activation("gelu")
    for wrong in (("swiglu", None, 1.702), ("swigluoai", 7.0)):
        with pytest.raises(ValueError, match="alpha is .*; 'swigluoai' needs one, and 'swiglu' has none"):
            reference.Activation(*wrong)


def test_a_weight_of_zero_gives_zero_whatever_the_bias():
    staged, gate_up, down = make_layer(128, 128, 2, 2, tokens=3)
    staged = staged._replace(topk_weights=torch.zeros(3, 2))
    assert (reference.layer(staged, gate_up, down, biases=make_biases(128, 128, 2)) == 0).all()


def test_stage_sanitises_ids_and_scales_weights():
    x, idx = torch.randn(2, 64).bfloat16(), torch.tensor([[0, 7, 8, -5], [2**40, 3, -1, 2**31]])
    staged = reference.stage(x, idx, torch.ones(2, 4), num_experts=8, routed_scaling_factor=2.5)
    assert staged.topk_idx.dtype == torch.int32
    assert staged.topk_idx.tolist() == [[0, 7, -1, -1], [-1, 3, -1, -1]]
    assert (staged.topk_weights == 2.5).all()
    again = reference.stage((staged.x, staged.x_sf), idx.clamp(-1, 9).int(), torch.ones(2, 4), 8)
    assert torch.equal(again.x.view(torch.uint8), staged.x.view(torch.uint8))


def test_no_tokens():
    staged, gate_up, down = make_layer(128, 128, 2, 2, tokens=0)
    for function in (reference.layer, reference.exact_layer):
        assert function(staged, gate_up, down).shape == (0, 128)


def test_recv_counts():
    ids = [torch.tensor([[0, 3], [3, -1]]), torch.zeros(0, 2, dtype=torch.int32), torch.tensor([[1, 3]])]
    assert reference.recv_counts(ids, 5).tolist() == [1, 1, 0, 3, 0]
