"""Misuse that no shape check sees: shared memory, other ranks' objects, process-wide defaults."""

import gc

import pytest
import torch

import deep_moe
from deep_moe import testing

T = 5


@pytest.fixture(scope="module")
def problem():
    return deep_moe.Problem(num_experts=2, num_topk=1, hidden=128, intermediate=128, max_tokens_per_rank=200)


@pytest.fixture(scope="module")
def weights(problem):
    return testing.random_weights(problem)


@pytest.fixture(scope="module")
def transformed(problem, weights):
    return deep_moe.transform_weights(problem, weights.gate_up, weights.down)


@pytest.fixture
def buffer(problem):
    buffer = deep_moe.SymmBuffer(None, problem, "cpu")
    yield buffer
    buffer.destroy()


def inputs(tokens: int = T):
    return torch.randn(tokens, 128).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)


def test_scales_are_fp32_whatever_the_default_dtype_is(problem, weights, transformed):
    try:
        torch.set_default_dtype(torch.bfloat16)
        l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, wanted in zip((l1, l2), transformed, strict=True):
        assert ours.scales.dtype is torch.float32 and torch.equal(ours.scales, wanted.scales)


def test_a_count_beyond_y_writes_only_the_rows_of_y(buffer, transformed):
    """An engine that writes the views itself raises the count but passes fewer rows."""
    x, idx, topk_weights = inputs()
    y = torch.full((T, 128), float("nan"), dtype=torch.bfloat16)
    deep_moe.stage(buffer, x, idx, topk_weights)
    deep_moe.fp8_mega_moe(y, *transformed, buffer)
    buffer.num_tokens.fill_(T)
    fewer = torch.full((3, 128), float("nan"), dtype=torch.bfloat16)
    deep_moe.fp8_mega_moe(fewer, *transformed, buffer)
    assert testing.same_bits(fewer, y[:3])


def test_memory_of_the_buffer_is_no_input_and_no_output(buffer, transformed):
    x, idx, topk_weights = inputs()
    with pytest.raises(ValueError, match="x lies in the symmetric buffer"):
        deep_moe.stage(buffer, (buffer.x[:T], buffer.x_sf[:T]), idx, topk_weights)
    with pytest.raises(ValueError, match="topk_idx lies in the symmetric buffer"):
        deep_moe.stage(buffer, x, buffer.topk_idx[:T], topk_weights)
    deep_moe.stage(buffer, x, idx, topk_weights)
    inside = buffer.field("x").view(torch.uint8).view(-1)[: T * 256].view(torch.bfloat16).view(T, 128)
    with pytest.raises(ValueError, match="y lies in the symmetric buffer"):
        deep_moe.fp8_mega_moe(inside, *transformed, buffer)
    y = torch.empty(T, 128, dtype=torch.bfloat16)
    deep_moe.fp8_mega_moe(y, *transformed, buffer)  # still usable
    assert y.isfinite().all()


def test_out_must_not_destroy_what_is_still_read(problem, weights):
    fused, sf = weights.fused_gate_up()
    down, down_sf = weights.down
    l1_like, l2_like = torch.empty_like(fused), torch.empty(2, 256, 128, dtype=fused.dtype)  # 128 rows of down, padded
    storage = torch.empty(3 * 256 * 128, dtype=torch.float8_e4m3fn)
    shifted = storage[: 2 * 256 * 128].view(2, 256, 128), storage[256 * 128 :].view(2, 256, 128)
    half_way = storage[64 * 128 :][: 2 * 256 * 128].view(2, 256, 128)  # the last up rows lie in the next expert
    halves = torch.empty(2, 2, 128, 128, dtype=torch.float8_e4m3fn)  # all gates, then all ups
    apart = ((halves[0], weights.gate[1]), (halves[1], weights.up[1]))
    for gate_up, down_pair, out in (
        ((shifted[0], sf), (down, down_sf), (shifted[1], l2_like)),
        ((half_way, sf), (down, down_sf), (shifted[0], l2_like)),
        (apart, (down, down_sf), (halves.view(2, 256, 128), l2_like)),
        ((fused, sf), (l1_like.view(-1)[: down.numel()].view(down.shape), down_sf), (l1_like, l2_like)),
        ((fused, sf), (l2_like[:1, :128].expand(2, -1, -1), down_sf), (l1_like, l2_like)),
        ((fused, sf), (l2_like[0].view(2, 128, 128), down_sf), (l1_like, l2_like)),  # unpadded: experts closer together
        ((fused, sf), (down, down_sf), (l1_like, l1_like)),
    ):
        with pytest.raises(ValueError, match="overlaps"):
            deep_moe.transform_weights(problem, gate_up, down_pair, out=out)


def test_transformed_weights_are_read_only(transformed):
    l1, _ = transformed
    with pytest.raises(AttributeError, match="transform_weights"):
        l1.weight = torch.zeros_like(l1.weight)


def test_another_ranks_buffer_is_named(problem, weights):
    group = deep_moe.LocalGroup(2, "cpu")
    buffers = group.run(lambda rank: deep_moe.SymmBuffer(rank, problem))

    def body(rank):
        if rank.rank() == 1:
            with pytest.raises(ValueError, match="belongs to rank 0, but this is the thread of rank 1"):
                deep_moe.stage(buffers[0], *inputs())

    group.run(body)
    group.run(lambda rank: buffers[rank.rank()].destroy())


def test_views_outlive_the_buffer(problem):
    buffer = deep_moe.SymmBuffer(None, problem, "cpu")
    view = buffer.topk_idx
    buffer.destroy()
    del buffer
    gc.collect()
    assert (view == -1).all()


def test_a_tensor_without_memory_is_refused(buffer):
    x, idx, topk_weights = inputs()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x has no memory"):
        deep_moe.stage(buffer, x, idx, topk_weights)


def test_the_cpu_has_one_name(problem):
    buffer = deep_moe.SymmBuffer(None, problem, "cpu:0")
    deep_moe.stage(buffer, *inputs())
    buffer.destroy()
    if not torch.cuda.is_available():
        with pytest.raises(deep_moe.DeviceError, match="no CUDA driver"):
            deep_moe.SymmBuffer(None, problem, "cuda")
