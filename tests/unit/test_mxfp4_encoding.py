"""The encoding of MXFP4: what is exact, what is rounded, and what the report says of it."""

import dataclasses
import math
import warnings

import pytest
import torch
from mxfp4_cases import decoded_parts, problem_of, random_mxfp4

import deep_moe
from deep_moe import _C, reference, testing
from deep_moe.ops.weight_format import EncodingReport

ONE_BLOCK = problem_of(128, 128, experts=1)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL_BYTES = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)  # of one group


def one_block(scales, packed=None):
    """(l1, l2) of a layer whose down is this block of 128x128, and whose gate and up are zeros."""
    zeros = torch.zeros(1, 128, 64, dtype=torch.uint8), torch.zeros(1, 128, 4, dtype=torch.uint8)
    packed = ALL_BYTES.repeat(128, 4) if packed is None else packed
    return (ONE_BLOCK, (zeros, zeros), (packed[None], scales.to(torch.uint8)[None]))


def exact(pair):
    return reference.dequantize_mxfp4(*pair, torch.float64)


def is_exact(result, pair):
    """In float64, as e4m3 numbers and block scales have it: fp32 has no 6 * 2^127."""
    decoded = decoded_parts(ONE_BLOCK, result)[0]
    return torch.equal(decoded, exact(pair)) and torch.equal(decoded.signbit(), exact(pair).signbit())


@pytest.mark.parametrize("code", range(255))
def test_all_codes_at_every_exponent_are_exact(code):
    """Alone, and beside groups up to 14 binades below."""
    for below in (0, 14):
        scales = code - torch.arange(512).view(128, 4) % (below + 1)
        arguments = one_block(scales.clamp_min(0))
        _, l2 = deep_moe.transform_weights(*arguments, strict=True)
        assert is_exact(l2, arguments[2]) and l2.report == EncodingReport()
        base = 2.0 ** max(code - 127 - 6, -126)
        assert l2.scales[0, 0].tolist() == [[base, 0], [0, 0]] and base >= torch.finfo(torch.float32).smallest_normal


@pytest.mark.parametrize("span", range(1, 16))
@pytest.mark.parametrize("largest", [14, 100, 254])
def test_spans_of_up_to_15_binades_are_exact(span, largest):
    generator = testing.generator_of(span)
    scales = torch.randint(largest - span + 1, largest + 1, (128, 4), generator=generator)
    scales[7, 1], scales[100, 2] = largest, largest - span + 1
    arguments = one_block(scales)
    _, l2 = deep_moe.transform_weights(*arguments, strict=True)
    assert is_exact(l2, arguments[2])
    stored = l2.weight[0, 0, 0, :2, 4096:]
    assert (stored.max(), stored.min()) == (14, 15 - span)
    assert (stored.min() >= _C.kMxfp4ExponentBias - 5) == (span <= 12)  # no e4m3 subnormals


def rounded_by_hand(scales):
    """Of a block of ALL_BYTES: float64 values, groups that changed, and the largest relative error."""
    lowest, values, changed, largest_error = int(scales.max()) - 14, torch.zeros(128, 128).double(), 0, 0.0
    for row in range(128):
        for group in range(4):
            binades, error = max(0, lowest - int(scales[row, group])), 0.0
            for k in range(32):
                exact_value = MAGNITUDES[k % 8] * 2.0**-binades
                code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - exact_value), c % 2))
                if exact_value:
                    error = max(error, abs(MAGNITUDES[code] - exact_value) / exact_value)
                sign = -1.0 if k % 16 >= 8 else 1.0
                exponent = max(int(scales[row, group]), lowest) - 127
                values[row, 32 * group + k] = math.copysign(math.ldexp(MAGNITUDES[code], exponent), sign)
            changed, largest_error = changed + (error > 0), max(largest_error, error)
    return values, changed, largest_error


@pytest.mark.parametrize("span", [16, 17, 18, 19, 20, 21, 40, 255])
def test_wider_spans_are_rounded_and_reported(span):
    scales = 254 - torch.arange(512).view(128, 4) % span
    arguments = one_block(scales)
    with pytest.warns(UserWarning, match="l2: .*groups of 32 weights in 1 blocks.*down\\[0\\], block of rows 0 to 127"):
        _, l2 = deep_moe.transform_weights(*arguments)
    values, changed, error = rounded_by_hand(scales)
    decoded = decoded_parts(ONE_BLOCK, l2)[0][0]
    assert torch.equal(decoded, values) and torch.equal(decoded.signbit(), values.signbit())
    assert (l2.report.blocks, l2.report.groups) == (1, changed)
    assert l2.report.largest_error == pytest.approx(error, rel=1e-6) == 1.0  # 0.5 becomes 0
    relative = (decoded - exact(arguments[2])[0]).abs() / exact(arguments[2])[0].abs()
    assert relative.nan_to_num(0).max() == pytest.approx(l2.report.largest_error)


def test_what_survives_a_rounding_is_no_error():
    """1 and 2 one binade too low are 0.5 and 1; 1.5 is rounded, by a third."""
    scales = torch.full((128, 4), 120)
    scales[0, 0] = 105
    packed = ALL_BYTES.repeat(128, 4)
    packed[0, :16] = 0x42
    _, l2 = deep_moe.transform_weights(*one_block(scales, packed), strict=True)
    assert is_exact(l2, one_block(scales, packed)[2])
    packed[0, 5] = 0x43
    with pytest.warns(UserWarning, match="1 groups of 32 weights in 1 blocks.*relative error is 0.333"):
        _, l2 = deep_moe.transform_weights(*one_block(scales, packed))
    assert (l2.report.blocks, l2.report.groups) == (1, 1) and l2.report.largest_error == pytest.approx(1 / 3)


@pytest.mark.parametrize("zeros_at", [0, 254])
def test_groups_of_zeros_do_not_count(zeros_at):
    """Neither above nor below the others, and of either sign; they get the exponent of the largest."""
    scales, packed = torch.full((128, 4), 120), ALL_BYTES.repeat(128, 4)
    scales[3], packed[3] = zeros_at, 0x80
    arguments = one_block(scales, packed)
    _, l2 = deep_moe.transform_weights(*arguments, strict=True)
    assert is_exact(l2, arguments[2]) and l2.scales[0, 0, 0, 0] == 2.0 ** (120 - 127 - 6)
    assert (l2.weight[0, 0, 0, :2, 4096:] == _C.kMxfp4MaxExponent).all()
    assert l2.dequantize()[0, 3].signbit().tolist() == [k % 2 == 1 for k in range(128)]


def test_a_group_that_vanishes_gets_the_exponent_of_the_largest():
    scales = torch.full((128, 4), 120)
    scales[5, 2] = 90
    with pytest.warns(UserWarning, match="error is 1,"):
        _, l2 = deep_moe.transform_weights(*one_block(scales))
    assert (l2.weight[0, 0, 0, :2, 4096:] == _C.kMxfp4MaxExponent).all()
    assert not l2.dequantize()[0, 5, 64:96].any()


def test_blocks_have_scales_of_their_own():
    """Gate and up too: 100 binades apart, all exact."""
    problem = problem_of(256, 256)
    weights = random_mxfp4(problem, (120, 127))
    for number, (_, scales) in enumerate((weights.gate, weights.up, weights.down)):
        scales[:, 128:] -= 50
        scales[:, :, 4:] += 30 + 40 * number
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down, strict=True)
    assert torch.equal(l1.dequantize(), torch.cat([reference.dequantize_mxfp4(*pair) for pair in weights.gate_up], 1))
    assert torch.equal(l2.dequantize(), reference.dequantize_mxfp4(*weights.down))


def test_strict_says_what_would_be_rounded():
    """Of all experts, as nothing has happened to any of them."""
    problem = problem_of(256, 256)
    weights = random_mxfp4(problem, (120, 127))
    for expert, row in ((0, 3), (1, 130), (1, 131)):
        weights.down[0][expert, row, 32:48], weights.down[1][expert, row, 2] = 0x11, 60
    with pytest.raises(ValueError) as raised:
        deep_moe.transform_weights(problem, weights.gate_up, weights.down, strict=True)
    text = str(raised.value)
    assert text.startswith("down cannot be encoded exactly: 3 groups of 32 weights in 2 blocks of 128x128 would be ")
    assert "were rounded" not in text and "relative error of up to 1;" in text and "strict=False" in text
    assert "down[0], block of rows 0 to 127 and K 0 to 127" in text


def test_a_warning_that_is_an_error_comes_after_everything_is_written():
    """Of l1; l2 and the biases, which are written later, are complete too."""
    problem = dataclasses.replace(problem_of(128, 128, experts=1), bias=True)
    wide, tame = random_mxfp4(problem, (0, 200)), random_mxfp4(problem, (115, 126), seed=1)
    biases = [dict(gate_up_bias=torch.full((1, 256), value), down_bias=torch.full((1, 128), value)) for value in (1, 2)]
    biases = [{name: bias.float() for name, bias in each.items()} for each in biases]
    out = deep_moe.transform_weights(problem, tame.gate_up, tame.down, **biases[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = deep_moe.transform_weights(problem, wide.gate_up, wide.down, **biases[1])
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="l1: .*were rounded"):
            deep_moe.transform_weights(problem, wide.gate_up, wide.down, out=out, **biases[1])
    for ours, new in zip(out, wanted, strict=True):
        assert torch.equal(ours.weight, new.weight) and torch.equal(ours.scales, new.scales)
        assert torch.equal(ours.bias, new.bias) and ours.report == new.report and ours.report.groups
