"""transform_weights: the bytes, the way back, storage reuse, and every wrong argument."""

import pytest
import torch

import deep_moe
from deep_moe import _C, reference, testing
from deep_moe.ops.weights import E4M3

EVEN = deep_moe.Problem(num_experts=4, num_topk=2, hidden=320, intermediate=256, max_tokens_per_rank=8)
ODD = deep_moe.Problem(num_experts=3, num_topk=1, hidden=448, intermediate=208, max_tokens_per_rank=8)


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def natural(weights):
    """fp32 gate_up and down, without the code under test."""
    gate, up, down = (reference.dequantize_blocks(*part) for part in (weights.gate, weights.up, weights.down))
    return torch.cat([gate, up], 1), down


@pytest.mark.parametrize("problem", [EVEN, ODD], ids=["even", "odd"])
def test_dequantize_gives_the_natural_layout_back(problem):
    weights = testing.random_weights(problem)
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    gate_up, down = natural(weights)
    assert torch.equal(l1.dequantize(), gate_up)
    assert torch.equal(l2.dequantize(), down)


def test_concatenated_and_separate_forms_give_the_same():
    weights = testing.random_weights(EVEN)
    apart = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    fused = deep_moe.transform_weights(EVEN, weights.fused_gate_up(), weights.down)
    for a, b in zip(apart, fused, strict=True):
        assert same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales)


def test_rows_and_records_are_where_the_kernel_reads_them():
    weights = testing.random_weights(ODD)
    l1, l2 = deep_moe.transform_weights(ODD, weights.gate_up, weights.down)
    for is_up, (codes, sf) in enumerate(weights.gate_up):
        for channel in (0, 7, 8, 127, 128, 207):
            row = _C.l1_row_of(channel, bool(is_up))
            assert same_bytes(l1.weight[:, row], codes[:, channel]), (channel, is_up)
            assert torch.equal(l1.scales[:, channel // 128, :, is_up], sf[:, channel // 128])
    config = ODD.configs(1)[0]
    assert l1.scales.shape == (3, config.l1_n_tiles, config.l1_k_blocks, 4)
    assert l1.scales[0, ..., 0].numel() == _C.l1_scale_records(config)
    assert l2.scales.shape == (3, config.l2_n_tiles, config.l2_k_blocks, 4)
    sf = weights.down[1]  # 448 rows: four blocks, two tiles
    assert torch.equal(l2.scales[:, 1, :, 0], sf[:, 2]) and torch.equal(l2.scales[:, 1, :, 1], sf[:, 3])
    assert not l1.scales[..., 2:].any() and not l2.scales[..., 2:].any()


def test_a_missing_last_block_has_scale_zero():
    problem = deep_moe.Problem(num_experts=2, num_topk=1, hidden=320, intermediate=128, max_tokens_per_rank=8)
    weights = testing.random_weights(problem)
    _, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)  # 320 rows: three blocks, two tiles
    assert not l2.scales[:, 1, :, 1].any() and l2.scales[:, 1, :, 0].all()


def test_out_keeps_addresses():
    first, second = (testing.random_weights(EVEN, seed=seed) for seed in (1, 2))
    out = deep_moe.transform_weights(EVEN, first.gate_up, first.down)
    keys = [part.key for part in out]
    again = deep_moe.transform_weights(EVEN, second.gate_up, second.down, out=out)
    assert all(a is b for a, b in zip(out, again, strict=True)) and [part.key for part in again] == keys
    fresh = deep_moe.transform_weights(EVEN, second.gate_up, second.down)
    for a, b in zip(again, fresh, strict=True):
        assert same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales)


def test_out_may_be_the_inputs_themselves():
    weights = testing.random_weights(EVEN)
    fresh = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    gate_up, down = weights.fused_gate_up(), weights.down
    l1, l2 = deep_moe.transform_weights(EVEN, gate_up, down, out=(gate_up[0], down[0]))
    assert l1.weight.data_ptr() == gate_up[0].data_ptr() and l2.weight.data_ptr() == down[0].data_ptr()
    for a, b in zip((l1, l2), fresh, strict=True):
        assert same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales)


def test_no_experts_of_other_ranks():
    """A rank transforms its own experts; any equal share of them is accepted."""
    weights = testing.random_weights(EVEN).of_rank(1, 2)
    l1, _ = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    assert l1.num_local_experts == 2


def wrong(change):
    """Arguments of a call with one of them changed."""
    weights = testing.random_weights(EVEN)
    arguments = dict(problem=EVEN, gate_up=weights.fused_gate_up(), down=weights.down, out=None)
    return {**arguments, **change(arguments, weights)}


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda a, w: dict(problem=3), TypeError, ["problem", "int", "Problem"]),
        (lambda a, w: dict(gate_up=a["gate_up"][0]), TypeError, ["gate_up", "Tensor", "pair"]),
        (lambda a, w: dict(gate_up=(a["gate_up"][0], 1.0)), TypeError, ["gate_up scales", "float"]),
        (lambda a, w: dict(gate_up=(a["gate_up"][0].float(), a["gate_up"][1])), ValueError, ["gate_up", "float32"]),
        (lambda a, w: dict(gate_up=(a["gate_up"][0][:, :-16], a["gate_up"][1])), ValueError, ["gate_up", "496", "512"]),
        (
            lambda a, w: dict(gate_up=(a["gate_up"][0], a["gate_up"][1][:, :3])),
            ValueError,
            ["gate_up scales", "128x128"],
        ),
        (lambda a, w: dict(gate_up=(a["gate_up"][0], a["gate_up"][1].half())), ValueError, ["float16", "float32"]),
        (lambda a, w: dict(gate_up=(w.gate, w.down)), ValueError, ["up", "[experts, I, H]"]),
        (lambda a, w: dict(down=(w.down[0].mT, w.down[1].mT)), ValueError, ["down", "[experts, H, I]"]),
        (lambda a, w: dict(down=(w.down[0][:2], w.down[1][:2])), ValueError, ["down", "[2, 320, 256]"]),
        (lambda a, w: dict(down=(w.down[0].to("meta"), w.down[1])), ValueError, ["down", "meta", "cpu"]),
        (lambda a, w: dict(out=3), TypeError, ["out", "pair"]),
        (lambda a, w: dict(out=(w.down[0], w.down[0])), ValueError, ["out[0]", "[4, 512, 320]"]),
    ],
)
def test_wrong_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        deep_moe.transform_weights(**wrong(change))
    for word in words:
        assert word in str(caught.value)


def test_wrong_number_of_experts():
    weights = testing.random_weights(EVEN).of_rank(0, 4)
    three = [(codes.expand(3, -1, -1), sf.expand(3, -1, -1)) for codes, sf in (*weights.gate_up, weights.down)]
    with pytest.raises(ValueError, match="gate_up holds 3 experts.*divisor of 4"):
        deep_moe.transform_weights(EVEN, three[:2], three[2])


def test_gate_and_up_in_one_block_are_refused_with_the_remedy():
    codes = torch.zeros(3, 416, 448).to(E4M3)
    with pytest.raises(ValueError, match=r"intermediate is 208.*multiple of 128.*\(\(gate, gate_sf\), \(up, up_sf\)\)"):
        deep_moe.transform_weights(ODD, (codes, torch.zeros(3, 4, 4)), testing.random_weights(ODD).down)


def test_out_of_another_kind_is_refused():
    weights = testing.random_weights(EVEN)
    l1, l2 = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    with pytest.raises(ValueError, match=r"out\[0\] is l2"):
        deep_moe.transform_weights(EVEN, weights.gate_up, weights.down, out=(l2, l1))
