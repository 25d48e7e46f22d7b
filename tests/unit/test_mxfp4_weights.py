"""transform_weights for MXFP4: every form of the input, storage reuse, and every wrong argument."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from mxfp4_cases import codes_of, problem_of, random_mxfp4

import deep_moe
from deep_moe import _C, reference, testing
from deep_moe.ops.weight_format import EncodingReport
from deep_moe.ops.weights import TransformedWeights, check_weights

PROBLEM = problem_of(192, 96)


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_results(some, others):
    return all(
        same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales) for a, b in zip(some, others, strict=True)
    )


def transformed(weights, **options):
    return deep_moe.transform_weights(PROBLEM, weights.gate_up, weights.down, **options)


def with_scales(weights, convert):
    return testing.Weights(*((q, convert(sf)) for q, sf in (weights.gate, weights.up, weights.down)))


def powers(codes, dtype):
    """By the bits of fp32, as 2^-127 is subnormal there."""
    bits = torch.where(codes == 0, 1 << 22, codes.int() << 23).to(torch.int32)
    return bits.view(torch.float32).to(dtype)


@pytest.mark.parametrize("exponents", [(0, 15), (113, 128), (240, 255)])
def test_every_type_of_scale_gives_the_same_bytes(exponents):
    weights = random_mxfp4(PROBLEM, exponents)
    wanted = transformed(weights)
    assert same_results(transformed(with_scales(weights, lambda sf: sf.view(torch.float8_e8m0fnu))), wanted)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype is not torch.float16 or exponents == (113, 128):
            assert same_results(transformed(with_scales(weights, lambda sf, dtype=dtype: powers(sf, dtype))), wanted)


def test_float16_subnormal_scales():
    weights = random_mxfp4(PROBLEM, (127 - 24, 127 - 14))
    halves = with_scales(weights, lambda sf: powers(sf, torch.float16))
    assert same_results(transformed(halves), transformed(weights))


def test_every_form_of_the_codes_gives_the_same_bytes():
    weights = random_mxfp4(PROBLEM, (115, 126))
    wanted = transformed(weights)
    signed = [(q.view(torch.int8), sf) for q, sf in (*weights.gate_up, weights.down)]
    blocks = [(q.unflatten(2, (-1, 16)), sf) for q, sf in (*weights.gate_up, weights.down)]
    for gate, up, down in (signed, blocks):
        assert same_results(deep_moe.transform_weights(PROBLEM, (gate, up), down), wanted)
    assert same_results(deep_moe.transform_weights(PROBLEM, weights.fused_gate_up(), weights.down), wanted)


def test_interleaved_gate_and_up():
    """gpt-oss: blocks [E, 2I, H/32, 16], gate in the even rows and up in the odd ones; passed as views."""
    weights = random_mxfp4(PROBLEM, (115, 126))
    (gate, gate_sf), (up, up_sf) = weights.gate_up
    blocks = torch.stack([gate, up], 2).flatten(1, 2).unflatten(2, (-1, 16))
    scales = torch.stack([gate_sf, up_sf], 2).flatten(1, 2)
    views = tuple((blocks[:, half::2], scales[:, half::2]) for half in (0, 1))
    assert not views[0][0].is_contiguous()
    assert same_results(deep_moe.transform_weights(PROBLEM, views, weights.down), transformed(weights))
    rows_last = [(q.mT.contiguous().mT, sf.mT.contiguous().mT) for q, sf in (*weights.gate_up, weights.down)]
    assert same_results(deep_moe.transform_weights(PROBLEM, rows_last[:2], rows_last[2]), transformed(weights))


def test_sizes_of_gpt_oss():
    """2880 is 22.5 blocks."""
    problem = problem_of(2880, 2880, experts=1)
    weights = random_mxfp4(problem, (113, 128))
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down, strict=True)
    assert l1.weight.shape == (1, 23, 23, 4, 4352) and l2.weight.shape == (1, 12, 23, 4, 4352)
    assert torch.equal(l1.dequantize(), torch.cat([reference.dequantize_mxfp4(*pair) for pair in weights.gate_up], 1))
    assert torch.equal(l2.dequantize(), reference.dequantize_mxfp4(*weights.down))


def test_out_keeps_addresses_and_renews_the_report():
    wide, tame = random_mxfp4(PROBLEM, (0, 200)), random_mxfp4(PROBLEM, (115, 126), seed=1)
    with pytest.warns(UserWarning, match="were rounded"):
        out = transformed(wide)
    keys = [part.key for part in out]
    assert all(part.report.groups for part in out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = transformed(tame, out=out)
    assert all(a is b for a, b in zip(out, again, strict=True)) and [part.key for part in again] == keys
    assert same_results(again, transformed(tame)) and all(part.report == EncodingReport() for part in again)
    with pytest.raises(AttributeError, match="report of TransformedWeights cannot be changed"):
        out[0].report = EncodingReport()


def test_out_may_be_plain_memory_or_hold_the_inputs():
    weights = random_mxfp4(PROBLEM, (115, 126))
    wanted = transformed(weights)
    config = PROBLEM.configs(1)[0]
    sizes = _C.l1_weight_bytes(config), _C.l2_weight_bytes(config)
    out = [torch.full((2, size), 0xEE, dtype=torch.uint8) for size in sizes]
    pairs = []
    places = (out[0], 8), (out[0], 16384), (out[1], 0)
    for (q, sf), (memory, start) in zip((*weights.gate_up, weights.down), places, strict=True):
        place = memory[:, start : start + q[0].numel()].unflatten(1, q.shape[1:])
        pairs.append((place.copy_(q), sf))
    result = deep_moe.transform_weights(PROBLEM, tuple(pairs[:2]), pairs[2], out=out)
    assert same_results(result, wanted)
    assert [part.weight.data_ptr() for part in result] == [memory.data_ptr() for memory in out]


def refused(error, words, problem=PROBLEM, weights=None, gate_up=None, down=None, **options):
    weights = weights or random_mxfp4(problem, (115, 126))
    gate_up, down = weights.gate_up if gate_up is None else gate_up, weights.down if down is None else down
    with pytest.raises(error) as caught:
        deep_moe.transform_weights(problem, gate_up, down, **options)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("matrix", ["gate", "up", "down", "gate_up"])
def test_nan_scales_are_refused_with_their_position(matrix, dtype):
    weights = random_mxfp4(PROBLEM, (115, 126))
    pairs = dict(gate=weights.gate, up=weights.up, down=weights.down, gate_up=weights.fused_gate_up())
    pairs[matrix][1][1, 70, 2] = 255
    pairs = {name: (q, sf.view(dtype)) for name, (q, sf) in pairs.items()}
    gate_up = pairs["gate_up"] if matrix == "gate_up" else (pairs["gate"], pairs["up"])
    words = [f"{matrix} scales[expert, row, group] at [1, 70, 2] is the e8m0 code 255, a NaN"]
    refused(ValueError, words, gate_up=gate_up, down=pairs["down"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, 0.75, math.inf, math.nan, 2.0**-128, 3 * 2.0**-127, 1 + 2.0**-7])
def test_float_scales_that_are_no_power_of_two_are_refused(value, dtype):
    weights = with_scales(random_mxfp4(PROBLEM, (115, 126)), lambda sf: powers(sf, dtype))
    weights.down[1][0, 191, 1] = value
    value = float(weights.down[1][0, 191, 1])  # as this type has it
    refused(ValueError, [f"down scales[expert, row, group] at [0, 191, 1] is {value!r}", "2^-127"], weights=weights)


def test_nothing_is_written_before_a_refusal():
    out = transformed(random_mxfp4(PROBLEM, (115, 126)))
    kept = [(part.weight.clone(), part.scales.clone()) for part in out]
    bad, wide = random_mxfp4(PROBLEM, (110, 112), seed=1), random_mxfp4(PROBLEM, (110, 112), seed=1)
    bad.down[1][1, 0, 0] = 255
    wide.down[1][1, 130, 2], wide.down[0][1, 130, 32:48] = 60, 0x11
    refused(ValueError, ["down scales"], weights=bad, out=out)
    words = ["down cannot be encoded exactly: 1 groups", "down[1], block of rows 128 to 255 and K 0 to 127", "strict"]
    refused(ValueError, words, weights=wide, out=out, strict=True)
    for part, (weight, scales) in zip(out, kept, strict=True):
        assert torch.equal(part.weight, weight) and torch.equal(part.scales, scales)


def test_wrong_arguments_are_named():
    weights = random_mxfp4(PROBLEM, (115, 126))
    q, sf = weights.down
    fp8 = q.view(torch.float8_e4m3fn)
    refused(TypeError, ["down", "Tensor", "(e2m1 codes, one power of two per 32 of K)"], down=q)
    refused(TypeError, ["down", "list", "torch.Tensor"], down=([1], sf))
    refused(
        ValueError,
        ["down has dtype torch.float8_e4m3fn", "mma_type 'fp8xfp8'; this one has 'fp8xmxfp4'"],
        down=(fp8, sf),
    )
    refused(ValueError, ["down has shape [2, 192, 47]", "[experts, H, I/2] = [2, 192, 48]"], down=(q[:, :, 1:], sf))
    blocks = q.unflatten(2, (-1, 8))
    refused(ValueError, ["[2, 192, 6, 8]", "[experts, H, I/32, 16] = [2, 192, 3, 16]"], down=(blocks, sf))
    refused(ValueError, ["down scales", "one per 32 of K = [2, 192, 3]"], down=(q, sf[:, ::2]))
    refused(
        ValueError, ["down scales has dtype torch.int32", "torch.uint8 or torch.float8_e8m0fnu"], down=(q, sf.int())
    )
    refused(ValueError, ["down is on meta", "cpu"], down=(q.to("meta"), sf))
    fused = weights.fused_gate_up()
    refused(ValueError, ["gate_up has shape", "[experts, 2I, H/2] = [2, 192, 96]"], gate_up=(fused[0][:, 1:], fused[1]))
    refused(ValueError, ["out[0] has dtype", "torch.uint8"], out=(fp8, fp8))
    refused(ValueError, ["out[0] has 18432 elements", "[experts, row tiles, K blocks, 4, 4352]"], out=(q, q))
    l1, l2 = transformed(weights)
    l1.weight.zero_()
    inside = l1.weight.view(-1)[: sf.numel()].view(sf.shape), l2.weight.view(-1)[: q.numel()].view(2, 96, 96)
    refused(ValueError, ["out[0]", "overlaps down scales"], out=(l1, l2), down=(q, inside[0]))
    gate_up = (inside[1], weights.gate[1]), weights.up
    refused(ValueError, ["out[1]", "overlaps gate at"], out=(l1, l2), gate_up=gate_up)


def test_fp8_and_mxfp4_are_not_mixed_up():
    fp8 = deep_moe.Problem(num_experts=2, num_topk=1, hidden=192, intermediate=96, max_tokens_per_rank=8)
    weights = random_mxfp4(PROBLEM, (115, 126))
    result = transformed(weights)
    of_fp8 = testing.random_weights(fp8)
    refused(ValueError, ["gate has dtype torch.float8_e4m3fn"], weights=of_fp8)
    refused(ValueError, ["gate has dtype torch.uint8"], problem=fp8, weights=weights)
    refused(ValueError, ["out[0] is l1 in layout mxfp4", "fp8-blocks"], problem=fp8, weights=of_fp8, out=result)
    for given, needed in ((result, fp8), (deep_moe.transform_weights(fp8, of_fp8.gate_up, of_fp8.down), PROBLEM)):
        buffer = deep_moe.SymmBuffer(None, needed, "cpu")
        words = f"l1 has mma_type '{given[0].mma_type}', but this buffer needs '{needed.mma_type}'"
        with pytest.raises(ValueError, match=words):
            check_weights("l1", given[0], buffer)
        buffer.destroy()
    assert TransformedWeights("l1", result[0].weight, result[0].scales, fp8).key != result[0].key


def test_a_layer_multiplies_by_what_the_encoding_kept():
    """The first channels of y come from rounded weights alone; the kernel and the reference round them alike."""
    weights, rounded = random_mxfp4(PROBLEM, (115, 126)), slice(64)
    weights.down[1][:, rounded] = 125 - 17
    with pytest.warns(UserWarning, match="l2: .* were rounded"):
        l1, l2 = transformed(weights)
    assert not l1.report.groups and l2.report.largest_error == 1
    tokens = PROBLEM.max_tokens_per_rank
    x, topk_idx = testing.random_activations(PROBLEM, tokens), torch.arange(tokens)[:, None] % 2
    topk_weights = torch.linspace(0.5, 1, tokens)[:, None]
    y = testing.poison(torch.empty(tokens, PROBLEM.hidden, dtype=torch.bfloat16))
    buffer = deep_moe.SymmBuffer(None, PROBLEM, "cpu")
    deep_moe.stage(buffer, x, topk_idx, topk_weights)
    deep_moe.fp8_mxfp4_mega_moe(y, l1, l2, buffer)
    buffer.destroy()
    staged = reference.stage(x, topk_idx, topk_weights, PROBLEM.num_experts)
    wanted = reference.layer(staged, weights.gate_up, weights.down)
    for channels in (slice(None), rounded):
        error = testing.error_of(y[:, channels], wanted[:, channels])
        assert error.frobenius <= testing.error_bar(PROBLEM, tokens), channels


def test_random_weights_are_exact():
    weights = testing.random_weights(PROBLEM, seed=5)
    l1, l2 = transformed(weights, strict=True)
    assert str(l1.report) == "exact"
    assert torch.equal(l1.dequantize(), torch.cat([reference.dequantize_mxfp4(*pair) for pair in weights.gate_up], 1))
    assert l2.dequantize().std() == pytest.approx(96**-0.5, rel=0.1)
    assert set(codes_of(weights.down[0]).unique().tolist()) == set(range(16))


@pytest.mark.parametrize("mma_type, other", [("fp8xfp8", "fp8xmxfp4"), ("fp8xmxfp4", "fp8xfp8")])
def test_weights_of_the_other_mma_type_are_not_to_be_converted(mma_type, other):
    problem = replace(problem_of(256, 128), mma_type=mma_type)
    weights = testing.random_weights(replace(problem, mma_type=other))
    with pytest.raises(ValueError, match=f"gate has dtype .* mma_type '{other}'; this one has '{mma_type}'"):
        deep_moe.transform_weights(problem, weights.gate_up, weights.down)
