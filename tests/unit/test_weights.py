"""transform_weights: the bytes, the way back, storage reuse, and every wrong argument."""

import pytest
import torch

import deep_moe
from deep_moe import _C, reference, testing
from deep_moe.ops.weights import E4M3, TransformedWeights

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


@pytest.mark.parametrize("problem", [EVEN, ODD], ids=["even", "odd"])
def test_rows_are_where_the_kernel_reads_them(problem):
    weights = testing.random_weights(problem)
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    config = problem.configs(1)[0]
    assert l1.weight.shape == (config.experts_per_rank, _C.l1_rows(config), config.hidden)
    assert l2.weight.shape == (config.experts_per_rank, config.hidden, config.intermediate)
    for codes, is_up in ((weights.gate[0], False), (weights.up[0], True)):
        rows = [_C.l1_row_of(channel, is_up) for channel in range(config.intermediate)]
        assert torch.equal(l1.weight.view(torch.uint8)[:, rows], codes.view(torch.uint8))
    rows = [_C.l2_row_of(channel) for channel in range(config.hidden)]
    assert torch.equal(l2.weight.view(torch.uint8)[:, rows], weights.down[0].view(torch.uint8))


@pytest.mark.parametrize("intermediate", [16, 80, 208])
def test_padding_rows_are_zeros_on_any_storage(intermediate):
    problem = deep_moe.Problem(num_experts=2, num_topk=1, hidden=64, intermediate=intermediate, max_tokens_per_rank=8)
    weights = testing.random_weights(problem)
    shapes = (2, _C.l1_rows(problem.configs(1)[0]), 64), (2, 64, intermediate)
    out = [torch.full(shape, 0x7F, dtype=torch.uint8).view(E4M3) for shape in shapes]
    l1, _ = deep_moe.transform_weights(problem, weights.gate_up, weights.down, out=out)
    rows = torch.arange(l1.weight.shape[1])
    used = torch.tensor([_C.l1_row_of(c, up) for c in range(intermediate) for up in (False, True)])
    padding = rows[~torch.isin(rows, used)]
    assert len(padding) and not l1.weight.view(torch.uint8)[:, padding].any()
    assert torch.equal(l1.dequantize(), natural(weights)[0])


def test_scale_records_are_where_the_kernel_reads_them():
    weights = testing.random_weights(ODD)
    l1, l2 = deep_moe.transform_weights(ODD, weights.gate_up, weights.down)
    config = ODD.configs(1)[0]
    for part, tiles, k_blocks in (
        (l1, config.l1_n_tiles, config.l1_k_blocks),
        (l2, config.l2_n_tiles, config.l2_k_blocks),
    ):
        assert part.scales.shape == (3, tiles, _C.scale_records(k_blocks), _C.kWeightScaleRecord)
    assert l1.scales[0, ..., 0].numel() == _C.l1_scale_records(config)
    assert l2.scales[0, ..., 0].numel() == _C.l2_scale_records(config)
    for is_up, (_, sf) in enumerate(weights.gate_up):
        assert torch.equal(l1.scales[..., :4, is_up], sf)
    sf = weights.down[1]  # 448 rows: four blocks, two tiles
    assert torch.equal(l2.scales[..., :2, 0], sf[:, ::2]) and torch.equal(l2.scales[..., :2, 1], sf[:, 1::2])


def test_missing_blocks_have_scale_zero():
    problem = deep_moe.Problem(num_experts=2, num_topk=1, hidden=320, intermediate=128, max_tokens_per_rank=8)
    weights = testing.random_weights(problem)
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    assert l1.scales.shape == (2, 1, 4, 2) and l2.scales.shape == (2, 2, 2, 2)
    assert l1.scales[:, :, :3].all() and not l1.scales[:, :, 3].any()  # 320 of K: three blocks
    assert l2.scales[:, 0, 0].all() and not l2.scales[:, :, 1].any()  # 128 of K: one block
    assert l2.scales[:, 1, 0, 0].all() and not l2.scales[:, 1, 0, 1].any()  # 320 rows: three blocks, two tiles


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


def test_out_may_hold_gate_and_up_of_each_expert_apart():
    """Anywhere in the expert, also where rows of padding make the result larger than the inputs."""
    weights = testing.random_weights(ODD)
    fresh = deep_moe.transform_weights(ODD, weights.gate_up, weights.down)
    memory = torch.zeros(3, 512, 448, dtype=torch.uint8).view(E4M3)  # 208 channels, padded to 256
    views = memory[:, 20:228], memory[:, 304:]
    for view, (codes, _) in zip(views, weights.gate_up, strict=True):
        view.copy_(codes)
    gate_up = tuple((view, sf) for view, (_, sf) in zip(views, weights.gate_up, strict=True))
    l1, _ = deep_moe.transform_weights(ODD, gate_up, weights.down, out=(memory, torch.empty_like(weights.down[0])))
    assert same_bytes(l1.weight, fresh[0].weight)


def test_unpadded_memory_is_refused_as_out():
    weights = testing.random_weights(ODD)
    unpadded = weights.fused_gate_up()[0]
    with pytest.raises(ValueError, match=r"out\[0\].*\[3, 416, 448\].*2 \* I padded to 64.*\[3, 512, 448\]"):
        deep_moe.transform_weights(ODD, weights.gate_up, weights.down, out=(unpadded, weights.down[0]))


def test_equal_padding_does_not_make_layers_equal():
    """208 and 256 channels have l1 of one shape: neither plans nor storage may be shared."""
    small, large = (
        deep_moe.Problem(num_experts=2, num_topk=1, hidden=64, intermediate=i, max_tokens_per_rank=8)
        for i in (208, 256)
    )
    w_small, w_large = (testing.random_weights(problem) for problem in (small, large))
    l1, _ = deep_moe.transform_weights(small, w_small.gate_up, w_small.down)
    _, l2 = deep_moe.transform_weights(large, w_large.gate_up, w_large.down)
    assert l1.key != TransformedWeights("l1", l1.weight, l1.scales, large).key
    with pytest.raises(ValueError, match=r"out\[0\] has intermediate 208; it must have 256"):
        deep_moe.transform_weights(large, w_large.gate_up, w_large.down, out=(l1, l2))


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
