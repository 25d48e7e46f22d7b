"""Biases in transform_weights: where the kernels read them, the way back, storage, and every wrong argument."""

import pytest
import torch

import deep_moe
from deep_moe import _C, testing
from deep_moe.ops.weights import check_weights

SIZES = dict(num_experts=3, num_topk=1, hidden=320, intermediate=208, max_tokens_per_rank=8)  # padded to 512 and 256
PROBLEM = deep_moe.Problem(**SIZES, bias=True)
WITHOUT = deep_moe.Problem(**SIZES)
WEIGHTS = testing.random_weights(PROBLEM)
GATE, UP, DOWN = WEIGHTS.biases
FUSED = torch.cat([GATE, UP], 1)


def transform(gate_up_bias=FUSED, down_bias=DOWN, problem=PROBLEM, out=None):
    return deep_moe.transform_weights(
        problem, WEIGHTS.gate_up, WEIGHTS.down, out, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def test_every_bias_is_where_the_kernel_reads_it():
    """A tile of 256 weight rows has its biases together, in the order of channels; padding is zeros."""
    l1, l2 = transform()
    assert l1.bias.dtype is l2.bias.dtype is torch.float32 and l1.bias.is_contiguous() and l2.bias.is_contiguous()
    l1_floats, l2_floats = l1.bias.flatten(1), l2.bias.flatten(1)
    assert l1_floats.shape == (3, 2 * _C.kBlockN) and l2_floats.shape == (3, 2 * _C.kBlockN)
    assert torch.equal(l1_floats[:, 0:416:2], GATE.float()) and torch.equal(l1_floats[:, 1:416:2], UP.float())
    assert torch.equal(l2_floats[:, :320], DOWN.float())
    assert not l1_floats[:, 416:].any() and not l2_floats[:, 320:].any()


def test_natural_bias_gives_what_was_passed():
    l1, l2 = transform()
    assert torch.equal(l1.natural_bias(), FUSED.float()) and torch.equal(l2.natural_bias(), DOWN.float())
    for part in deep_moe.transform_weights(WITHOUT, WEIGHTS.gate_up, WEIGHTS.down):
        assert part.bias is None and part.natural_bias() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_tensor_and_gate_and_up_apart_give_the_same(dtype):
    """Strided halves as well: gpt-oss has gate and up in turns."""
    gate, up, down = (bias.to(dtype) for bias in (GATE, UP, DOWN))
    turns = torch.stack([gate, up], 2).flatten(1)
    for form in (torch.cat([gate, up], 1), (gate, up), [turns[:, 0::2], turns[:, 1::2]]):
        l1, l2 = transform(form, down)
        assert torch.equal(l1.natural_bias(), torch.cat([gate, up], 1).float())
        assert torch.equal(l2.natural_bias(), down.float())


def test_out_keeps_the_addresses_of_biases():
    out = transform()
    keys, addresses = [part.key for part in out], [part.bias.data_ptr() for part in out]
    again = transform(-FUSED, 2 * DOWN, out=out)
    assert all(a is b for a, b in zip(out, again, strict=True))
    assert keys == [part.key for part in again] and addresses == [part.bias.data_ptr() for part in again]
    assert torch.equal(out[0].natural_bias(), -FUSED.float())
    assert torch.equal(out[1].natural_bias(), 2 * DOWN.float())


def test_biases_may_lie_in_what_is_written():
    """They are read before anything is written."""
    out = transform()
    l1, l2 = out
    swapped = l1.bias.flatten(1, 2)[:, :208].flip(2)
    in_weights = l1.weight.view(-1).view(torch.float32)[: 3 * 320].view(3, 320)
    in_weights.copy_(DOWN)
    transform((l1.bias.flatten(1, 2)[:, :208, 1], l1.bias.flatten(1, 2)[:, :208, 0]), in_weights, out=out)
    assert torch.equal(l1.bias.flatten(1, 2)[:, :208], swapped)
    assert torch.equal(l2.natural_bias(), DOWN.float())


def test_keys_tell_layers_with_biases_apart():
    l1, _ = transform()
    other = type(l1)("l1", l1.weight, l1.scales, WITHOUT)
    assert other.key != l1.key


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(gate_up_bias=None), ValueError, ["gate_up_bias is None", "bias=True", "this rank's experts"]),
        (dict(down_bias=None), ValueError, ["down_bias is None", "bias=True"]),
        (dict(problem=WITHOUT), ValueError, ["gate_up_bias is a Tensor", "bias=False", "leave it out"]),
        (dict(problem=WITHOUT, gate_up_bias=None), ValueError, ["down_bias is a Tensor", "bias=False"]),
        (dict(gate_up_bias=3.0), TypeError, ["gate_up_bias is a float", "torch.Tensor"]),
        (dict(gate_up_bias=(GATE,)), TypeError, ["gate_up_bias holds 1 items", "a pair (gate, up)"]),
        (dict(gate_up_bias=(GATE, 1)), TypeError, ["gate_up_bias (up) is a int"]),
        (dict(gate_up_bias=(GATE, DOWN)), ValueError, ["gate_up_bias (up) has shape [3, 320]", "[experts, I]", "208"]),
        (dict(gate_up_bias=FUSED[:2]), ValueError, ["gate_up_bias has shape [2, 416]", "[experts, 2I] = [3, 416]"]),
        (dict(gate_up_bias=FUSED.int()), ValueError, ["gate_up_bias has dtype torch.int32", "torch.bfloat16"]),
        (dict(down_bias=GATE), ValueError, ["down_bias has shape [3, 208]", "[experts, H] = [3, 320]"]),
        (dict(down_bias=DOWN.to("meta")), ValueError, ["down_bias is on meta", "cpu"]),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(arguments, error, words):
    out = transform()
    before = [part.bias.clone() for part in out], [part.weight.clone() for part in out]
    with pytest.raises(error) as caught:
        transform(**{**dict(gate_up_bias=-FUSED, down_bias=-DOWN, out=out), **arguments})
    for word in words:
        assert word in str(caught.value)
    for part, bias, weight in zip(out, *before, strict=True):
        assert torch.equal(part.bias, bias)
        assert testing.same_bits(part.weight, weight)


def test_out_must_have_biases_when_the_problem_has():
    without = deep_moe.transform_weights(WITHOUT, WEIGHTS.gate_up, WEIGHTS.down)
    with pytest.raises(ValueError, match=r"out\[0\] has bias False; it must be of a problem with bias=True"):
        transform(out=without)
    with pytest.raises(ValueError, match=r"out\[0\] has bias True; it must be of a problem with bias=False"):
        transform(None, None, WITHOUT, out=transform())


def test_a_buffer_refuses_weights_that_have_biases_and_should_not_or_lack_them():
    without = deep_moe.transform_weights(WITHOUT, WEIGHTS.gate_up, WEIGHTS.down)
    for problem, wrong, words in (
        (PROBLEM, without, "l1 has bias False, but this buffer needs True"),
        (WITHOUT, transform(), "l1 has bias True, but this buffer needs False"),
    ):
        buffer = deep_moe.SymmBuffer(None, problem, "cpu")
        with pytest.raises(ValueError, match=words):
            check_weights("l1", wrong[0], buffer)
        buffer.destroy()
