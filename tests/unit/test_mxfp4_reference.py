"""deep_moe.reference for MXFP4, against the standard written out in Python numbers, one weight at a time."""

import math
import re

import pytest
import torch

from deep_moe import reference, testing

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL_CODES = torch.arange(32) % 16  # one group


def value_of(code: int, exponent_code: int) -> float:
    return math.copysign(math.ldexp(MAGNITUDES[code & 7], exponent_code - 127), -1.0 if code & 8 else 1.0)


def nearest(value: float) -> int:
    """The code, without a sign, of the nearest magnitude; ties to even."""
    return min(range(8), key=lambda code: (abs(MAGNITUDES[code] - value), code % 2))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] of 0 to 15 -> u8 [..., K/2]; even columns low."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Zeros of different signs are different."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def random_mxfp4(n, k, exponents, seed=0):
    """(u8 [n, k/2], u8 [n, k/32]): any codes, exponent codes from this range."""
    generator = testing.generator_of(seed)
    scales = torch.randint(*exponents, (n, k // 32), generator=generator).to(torch.uint8)
    return torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8), scales


def test_all_codes_and_exponents():
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    packed = pack(ALL_CODES).expand(255, -1)
    wanted = torch.tensor([[value_of(int(code), e) for code in ALL_CODES] for e in range(255)], dtype=torch.float64)
    assert same_numbers(reference.dequantize_mxfp4(packed, scales, torch.float64), wanted)
    single = reference.dequantize_mxfp4(packed, scales)
    assert single.dtype is torch.float32 and same_numbers(single, wanted.float())
    assert single[0, 1] == 2.0**-128 and single[254, 4] == math.inf  # 2 * 2^127 is no fp32 number


def test_every_form_of_the_input_means_the_same():
    packed, scales = random_mxfp4(64, 128, (120, 135))
    wanted = reference.dequantize_mxfp4(packed, scales)
    values = torch.exp2(scales.double() - 127)
    for form in (
        scales.view(torch.float8_e8m0fnu),
        *(values.to(t) for t in (torch.float32, torch.bfloat16, torch.half)),
    ):
        assert same_numbers(reference.dequantize_mxfp4(packed, form), wanted)
    assert same_numbers(reference.dequantize_mxfp4(packed.view(torch.int8), scales), wanted)
    assert same_numbers(reference.dequantize_mxfp4(packed.view(1, 64, 4, 16), scales[None]), wanted[None])


def test_nan_scales_give_nan():
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    values = reference.dequantize_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), scales)
    assert not values[0, :32].isnan().any() and values[0, 32:].isnan().all()


@pytest.mark.parametrize("exponent", [-127, -126, 0, 126, 127])
def test_float_scales_of_every_size(exponent):
    packed, scales = random_mxfp4(3, 64, (127, 128))
    wanted = reference.dequantize_mxfp4(packed, scales + exponent, torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        floats = torch.full((3, 2), 2.0**exponent, dtype=torch.float64).to(dtype)
        assert same_numbers(reference.dequantize_mxfp4(packed, floats, torch.float64), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, 0.75, math.inf, math.nan, 2.0**-128, 2.0**128, 1 + 2.0**-7])
def test_float_scales_that_are_no_power_of_two_are_refused(value, dtype):
    packed, scales = random_mxfp4(64, 128, (120, 135))
    scales = torch.exp2(scales.double() - 127).to(dtype)
    scales[40, 3] = torch.tensor(value, dtype=torch.float64).to(dtype)
    words = f"scales at [40, 3] is {float(scales[40, 3])!r}; it must be a power of two from 2^-127 to 2^127"
    for call in (reference.dequantize_mxfp4, reference.encode_mxfp4):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(packed, scales)


def test_nan_scales_cannot_be_encoded():
    scales = torch.full((2, 128, 4), 127, dtype=torch.uint8)
    scales[1, 5, 2] = 255
    for codes in (scales, scales.view(torch.float8_e8m0fnu)):
        with pytest.raises(ValueError, match=r"scales at \[1, 5, 2\] is the code 255, a NaN"):
            reference.encode_mxfp4(torch.zeros(2, 128, 64, dtype=torch.uint8), codes)


PAIRS = {"packed": torch.zeros(2, 64, 48, dtype=torch.uint8), "scales": torch.full((2, 64, 3), 127, dtype=torch.uint8)}


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("packed", lambda t: t[0, 0], "packed has shape [48]; it must be [N, K/2], [E, N, K/2] or [E, N, K/32, 16]"),
        ("packed", lambda t: t[None], "packed has shape [1, 2, 64, 48]"),
        ("packed", lambda t: t.unflatten(2, (-1, 8)), "packed has shape [2, 64, 6, 8]"),
        ("packed", lambda t: t[None].unflatten(3, (-1, 16)), "packed has shape [1, 2, 64, 3, 16]"),
        ("packed", lambda t: t[..., :-1], "packed has shape [2, 64, 47]"),
        ("packed", lambda t: t.int(), "packed has dtype torch.int32; it must be torch.uint8 or torch.int8"),
        ("scales", lambda t: t[0], "scales has shape [64, 3]; it must be one per 32 of K = [2, 64, 3]"),
        ("scales", lambda t: t[..., :1], "scales has shape [2, 64, 1]"),
        ("scales", lambda t: t[..., None], "scales has shape [2, 64, 3, 1]"),
        ("scales", lambda t: t.int(), "scales has dtype torch.int32; it must be torch.uint8 or torch.float8_e8m0fnu"),
        ("scales", lambda t: t.view(torch.float8_e4m3fn), "scales has dtype torch.float8_e4m3fn"),
    ],
)
def test_wrong_shapes_and_dtypes(name, change, words):
    for call in (reference.dequantize_mxfp4, reference.encode_mxfp4):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(**PAIRS | {name: change(PAIRS[name])})


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e30])
def test_quantize_is_the_standard(scale):
    w = torch.randn(4, 64, generator=testing.generator_of(1)) * scale
    w[0, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9] * 4) * 2.0**-3  # ties, and beyond 6
    w[1, 32:] = 0
    packed, scales = reference.quantize_mxfp4(w)
    wanted = torch.zeros(4, 64, dtype=torch.float64)
    for row in range(4):
        for start in (0, 32):
            group = w[row, start : start + 32].double().tolist()
            largest = max(map(abs, group))
            exponent = math.floor(math.log2(largest)) - 2 if largest else 0
            for k, x in enumerate(group):
                code = nearest(math.ldexp(abs(x), -exponent))
                wanted[row, start + k] = math.copysign(math.ldexp(MAGNITUDES[code], exponent), x)
    assert same_numbers(reference.dequantize_mxfp4(packed, scales, torch.float64), wanted)


def test_quantize_keeps_mxfp4():
    """All codes at all exponents whose values are finite in fp32; 6 fixes the exponent of the group."""
    scales = torch.arange(253, dtype=torch.uint8)[:, None]
    packed = pack(ALL_CODES).expand(253, -1)
    again = reference.quantize_mxfp4(reference.dequantize_mxfp4(packed, scales))
    assert torch.equal(again[0], packed) and torch.equal(again[1], scales)


def encoded_by_hand(packed, scales):
    """What the layer multiplies, float64 [n, k], and the exponent of each block's scale (None: a block of zeros)."""
    n, k = scales.shape[0], scales.shape[1] * 32
    codes = [[int(byte) >> shift & 15 for byte in row for shift in (0, 4)] for row in packed.tolist()]
    values, bases = torch.zeros(n, k, dtype=torch.float64), {}
    for row0 in range(0, n, 128):
        for k0 in range(0, k, 128):
            places = [(row, col) for row in range(row0, min(row0 + 128, n)) for col in range(k0, min(k0 + 128, k))]
            exponents = [int(scales[row, col // 32]) - 127 for row, col in places if codes[row][col] & 7]
            base = bases[row0 // 128, k0 // 128] = max(max(exponents) - 6, -126) if exponents else None
            for row, col in places:
                exponent, code = int(scales[row, col // 32]) - 127, codes[row][col]
                if base is not None and exponent < base - 8:
                    code = code & 8 | nearest(math.ldexp(MAGNITUDES[code & 7], exponent - (base - 8)))
                    exponent = base - 8
                values[row, col] = value_of(code, exponent + 127)
    return values, bases


@pytest.mark.parametrize("exponents", [(100, 115), (0, 15), (100, 125), (0, 255), (126, 127)])
@pytest.mark.parametrize("n, k", [(128, 128), (160, 192)])
def test_encode_is_its_definition(n, k, exponents):
    packed, scales = random_mxfp4(n, k, exponents, seed=2)
    packed[:, 16:32] &= 0x88  # a column of groups of zeros, whatever their exponents
    values, bases = encoded_by_hand(packed, scales)
    q, sf = reference.encode_mxfp4(packed, scales)
    assert same_numbers(reference.dequantize_blocks(q, sf, torch.float64), values)
    assert sf.shape == (-(-n // 128), -(-k // 128)) and q.dtype is torch.float8_e4m3fn
    assert all(sf[place] == 2.0**base for place, base in bases.items())


def test_the_scale_of_zeros_is_zero():
    q, sf = reference.encode_mxfp4(torch.zeros(2, 64, dtype=torch.uint8), torch.full((2, 4), 254, dtype=torch.uint8))
    assert sf.tolist() == [[0.0]] and not q.float().any()


@pytest.mark.parametrize("fused", [False, True])
def test_layers_run_on_mxfp4(fused):
    """As the same layers do on the encoded weights, and the exact one as float64 does on the checkpoint's weights."""
    generator = testing.generator_of(3)
    (e, h, i), tokens = (3, 192, 96), 5

    def matrix(n, k, seed):
        return tuple(map(torch.stack, zip(*(random_mxfp4(n, k, (117, 122), seed + s) for s in range(e)), strict=True)))

    gate, up, down = matrix(i, h, 10), matrix(i, h, 20), matrix(h, i, 30)
    gate_up = testing.Weights(gate, up, down).fused_gate_up() if fused else (gate, up)
    ids = torch.tensor([[0, 1], [2, 2], [-1, 1], [0, -1], [1, 2]])
    staged = reference.stage(torch.randn(tokens, h, generator=generator).bfloat16(), ids, torch.ones(tokens, 2), e)
    encoded, clamped = [reference.encode_mxfp4(*pair) for pair in (gate, up, down)], reference.Activation(clamp=10.0)
    assert torch.equal(
        reference.layer(staged, gate_up, down, clamped),
        reference.layer(staged, tuple(encoded[:2]), encoded[2], clamped),
    )
    w_gate, w_up, w_down = (reference.dequantize_mxfp4(*pair, torch.float64) for pair in (gate, up, down))
    x, wanted = reference.dequantize_rows(staged.x, staged.x_sf, torch.float64), torch.zeros(tokens, h).double()
    for token, slot in ((t, s) for t in range(tokens) for s in range(2) if ids[t, s] >= 0):
        expert = ids[token, slot]
        hidden = torch.nn.functional.silu(w_gate[expert] @ x[token]) * (w_up[expert] @ x[token])
        wanted[token] += w_down[expert] @ hidden
    torch.testing.assert_close(reference.exact_layer(staged, gate_up, down), wanted, rtol=1e-12, atol=1e-12)
