"""transform_weights: the bytes, the way back, storage reuse, and every wrong argument."""

import copy

import pytest
import torch

import deep_moe
from deep_moe import _C, reference, testing
from deep_moe.ops.fp8 import E4M3
from deep_moe.ops.weights import TransformedWeights, check_weights

EVEN = deep_moe.Problem(num_experts=4, num_topk=2, hidden=512, intermediate=256, max_tokens_per_rank=8)  # whole blocks
ODD = deep_moe.Problem(num_experts=3, num_topk=1, hidden=448, intermediate=208, max_tokens_per_rank=8)
L1_EVEN = deep_moe.Problem(num_experts=2, num_topk=1, hidden=384, intermediate=128, max_tokens_per_rank=8)


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


def places(rows, columns, k_blocks):
    """Where the kernel reads a matrix whose rows are these of the transformed one: indices into an expert's bytes."""
    return torch.tensor([[_C.weight_byte_of(k_blocks, row, k) for k in range(columns)] for row in rows])


def expected_bytes(problem, weights):
    """The transformed l1 and l2 [experts, bytes], element by element as the C++ layout has it, zeros elsewhere."""
    config = problem.configs(1)[0]
    h, i = problem.hidden, problem.intermediate
    l1, l2 = (
        torch.zeros(problem.num_experts, size(config), dtype=torch.uint8)
        for size in (_C.l1_weight_bytes, _C.l2_weight_bytes)
    )
    for (codes, _), is_up in zip(weights.gate_up, (False, True), strict=True):
        rows = [_C.l1_row_of(channel, is_up) for channel in range(i)]
        l1[:, places(rows, h, config.l1_k_blocks)] = codes.view(torch.uint8)
    rows = [_C.l2_row_of(channel) for channel in range(h)]
    l2[:, places(rows, i, config.l2_k_blocks)] = weights.down[0].view(torch.uint8)
    return l1, l2


def empty_storage(problem, experts):
    """Two tensors for out=, full of NaN, of a shape that is not that of the result."""
    sizes = (size(problem.configs(1)[0]) for size in (_C.l1_weight_bytes, _C.l2_weight_bytes))
    return [torch.full((experts * size,), 0x7F, dtype=torch.uint8).view(E4M3) for size in sizes]


@pytest.mark.parametrize("storage", ["new", "reused"])
@pytest.mark.parametrize("hidden, intermediate", [(512, 256), (448, 208), (384, 128), (256, 80), (64, 16), (320, 384)])
def test_every_element_is_where_the_kernel_reads_it(hidden, intermediate, storage):
    """And padding is zeros, whatever was in the memory."""
    sizes = dict(hidden=hidden, intermediate=intermediate)
    problem = deep_moe.Problem(num_experts=2, num_topk=1, max_tokens_per_rank=8, **sizes)
    weights = testing.random_weights(problem)
    out = empty_storage(problem, 2) if storage == "reused" else None
    result = deep_moe.transform_weights(problem, weights.gate_up, weights.down, out=out)
    for part, wanted in zip(result, expected_bytes(problem, weights), strict=True):
        assert part.weight.shape[0] == 2 and part.weight.shape[3:] == (_C.kBlockN, _C.kBlockK)
        assert torch.equal(part.weight.view(torch.uint8).flatten(1), wanted)
    for part, wanted in zip(result, natural(weights), strict=True):
        assert torch.equal(part.dequantize(), wanted)


def test_scale_records_are_where_the_kernel_reads_them():
    weights = testing.random_weights(ODD)
    l1, l2 = deep_moe.transform_weights(ODD, weights.gate_up, weights.down)
    config = ODD.configs(1)[0]
    for part, tiles, k_blocks in (
        (l1, config.l1_weight_tiles, config.l1_k_blocks),
        (l2, config.l2_weight_tiles, config.l2_k_blocks),
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


def test_a_copy_has_memory_and_a_key_of_its_own():
    first, second = (testing.random_weights(EVEN, seed=seed) for seed in (1, 2))
    out = deep_moe.transform_weights(EVEN, first.gate_up, first.down)
    copies = copy.deepcopy(out)
    deep_moe.transform_weights(EVEN, second.gate_up, second.down, out=copies)
    for part, copied in zip(out, copies, strict=True):
        assert copied.key != part.key and copied.key[0] == copied.weight.data_ptr()
        assert not torch.equal(part.dequantize(), copied.dequantize())
    assert torch.equal(out[1].dequantize(), deep_moe.transform_weights(EVEN, first.gate_up, first.down)[1].dequantize())


def test_inputs_may_not_be_the_scales_of_out():
    weights = testing.random_weights(EVEN)
    out = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    (gate, gate_sf), up = weights.gate_up
    own = out[0].scales[:, :, : gate_sf.shape[2], 1]
    with pytest.raises(ValueError, match=r"out\[0\].scales at .* overlaps gate scales"):
        deep_moe.transform_weights(EVEN, ((gate, own), up), weights.down, out=out)


def test_parameters_leave_no_graph():
    weights = testing.random_weights(EVEN)
    scales = torch.nn.Parameter(weights.down[1])
    _, l2 = deep_moe.transform_weights(EVEN, weights.gate_up, (weights.down[0], scales))
    assert not l2.scales.requires_grad and torch.equal(l2.scales[:, :, : scales.shape[2], 0], scales[:, ::2])


def test_out_may_be_the_inputs_themselves():
    weights = testing.random_weights(EVEN)
    fresh = deep_moe.transform_weights(EVEN, weights.gate_up, weights.down)
    gate_up, down = weights.fused_gate_up(), weights.down
    l1, l2 = deep_moe.transform_weights(EVEN, gate_up, down, out=(gate_up[0], down[0]))
    assert l1.weight.data_ptr() == gate_up[0].data_ptr() and l2.weight.data_ptr() == down[0].data_ptr()
    for a, b in zip((l1, l2), fresh, strict=True):
        assert same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales)


def test_out_may_be_one_of_the_inputs():
    """384 rows of down are padded to 512, so that only gate_up has the size of the result."""
    weights = testing.random_weights(L1_EVEN)
    fresh = deep_moe.transform_weights(L1_EVEN, weights.gate_up, weights.down)
    gate_up = weights.fused_gate_up()
    out = gate_up[0], empty_storage(L1_EVEN, 2)[1]
    l1, l2 = deep_moe.transform_weights(L1_EVEN, gate_up, weights.down, out=out)
    assert (l1.weight.data_ptr(), l2.weight.data_ptr()) == tuple(tensor.data_ptr() for tensor in out)
    assert same_bytes(l1.weight, fresh[0].weight) and same_bytes(l2.weight, fresh[1].weight)


def test_out_may_hold_the_inputs_of_each_expert_anywhere():
    """Also where padding makes the result larger than the inputs."""
    weights = testing.random_weights(ODD)
    fresh = deep_moe.transform_weights(ODD, weights.gate_up, weights.down)
    l1_memory, l2_memory = out = [torch.zeros(3, 512, columns, dtype=torch.uint8).view(E4M3) for columns in (512, 256)]
    places = l1_memory[:, 20:228, 3:451], l1_memory[:, 304:, 64:], l2_memory[:, 1:449, 48:]
    inputs = []
    for place, (codes, sf) in zip(places, (*weights.gate_up, weights.down), strict=True):
        place.copy_(codes)
        inputs.append((place, sf))
    result = deep_moe.transform_weights(ODD, inputs[:2], inputs[2], out=out)
    for a, b in zip(result, fresh, strict=True):
        assert same_bytes(a.weight, b.weight) and torch.equal(a.scales, b.scales)


def test_unpadded_memory_is_refused_as_out():
    weights = testing.random_weights(ODD)
    l1, l2 = empty_storage(ODD, 3)
    for out, words in (
        ((weights.fused_gate_up()[0], l2), r"out\[0\].* 559104 .*\[3, 416, 448\].* 786432.* \[3, 2, 4, 256, 128\]"),
        ((l1, weights.down[0]), r"out\[1\].* 279552 .*\[3, 448, 208\].* 393216.*padded.* \[3, 2, 2, 256, 128\]"),
    ):
        with pytest.raises(ValueError, match=words):
            deep_moe.transform_weights(ODD, weights.gate_up, weights.down, out=out)


def test_out_must_be_contiguous_and_aligned():
    weights = testing.random_weights(EVEN)
    l1, l2 = empty_storage(EVEN, 4)
    shifted = torch.empty(l2.numel() + 16, dtype=torch.uint8)[8:-8].view(E4M3)
    for out in ((l1.view(2, -1).mT, l2), (l1, shifted)):
        with pytest.raises(ValueError, match="contiguous and 16-byte aligned"):
            deep_moe.transform_weights(EVEN, weights.gate_up, weights.down, out=out)


@pytest.mark.parametrize("fact, size, padded", [("intermediate", 208, 256), ("hidden", 192, 256)])
def test_equal_padding_does_not_make_layers_equal(fact, size, padded):
    """Two layers whose matrices have one shape in memory: neither plans, storage nor buffers may be shared."""
    even = dict(hidden=256, intermediate=256)
    small, large = (
        deep_moe.Problem(num_experts=2, num_topk=1, max_tokens_per_rank=8, **{**even, fact: value})
        for value in (size, padded)
    )
    w_small, w_large = (testing.random_weights(problem) for problem in (small, large))
    smalls = deep_moe.transform_weights(small, w_small.gate_up, w_small.down)
    larges = deep_moe.transform_weights(large, w_large.gate_up, w_large.down)
    buffer = deep_moe.SymmBuffer(None, large, "cpu")
    for number, (name, part) in enumerate(zip(("l1", "l2"), smalls, strict=True)):
        assert part.weight.shape == larges[number].weight.shape
        assert part.key != TransformedWeights(name, part.weight, part.scales, large).key
        out = [part if i == number else other for i, other in enumerate(larges)]
        with pytest.raises(ValueError, match=rf"out\[{number}\] has {fact} {size}; it must have {padded}"):
            deep_moe.transform_weights(large, w_large.gate_up, w_large.down, out=out)
        with pytest.raises(ValueError, match=rf"{name} has {fact} {size}, but this buffer needs {padded}"):
            check_weights(name, part, buffer)
    buffer.destroy()


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
        (lambda a, w: dict(down=(w.down[0][:2], w.down[1][:2])), ValueError, ["down", "[2, 512, 256]"]),
        (lambda a, w: dict(down=(w.down[0].to("meta"), w.down[1])), ValueError, ["down", "meta", "cpu"]),
        (lambda a, w: dict(out=3), TypeError, ["out", "pair"]),
        (lambda a, w: dict(out=(w.down[0], w.down[0])), ValueError, ["out[0]", "1048576", "[4, 2, 4, 256, 128]"]),
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
