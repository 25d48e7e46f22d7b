"""Wrong arguments of stage and fp8_mega_moe: a sentence that names argument, value, what is allowed and the remedy."""

import pytest
import torch

import deep_moe
from deep_moe.ops.fp8 import E4M3

T, H, K, E = 5, 128, 1, 2  # of the geometry "small"


@pytest.fixture
def rank(worlds):
    """Rank 0 of a world whose buffer has no launch in flight; nothing here may launch the other one."""
    world = worlds("small")
    rank = world.ranks[0]
    deep_moe.stage(rank.buffer, **staged())
    return rank


def staged(**changes):
    """Right arguments of stage, some of them changed."""
    right = dict(
        x=torch.zeros(T, H, dtype=torch.bfloat16),
        topk_idx=torch.zeros(T, K, dtype=torch.int32),
        topk_weights=torch.ones(T, K),
    )
    return {**right, **changes}


def e4m3(rows=T, columns=H):
    return torch.zeros(rows, columns).to(E4M3)


BF16 = torch.bfloat16
WRONG_STAGE = {
    "x is no tensor": (dict(x=[1.0]), TypeError, ["x is a list", "torch.Tensor"]),
    "x dtype": (dict(x=torch.zeros(T, H)), ValueError, ["x has dtype torch.float32", "torch.bfloat16"]),
    "x without scales": (dict(x=e4m3()), ValueError, ["e4m3 without scales", "(x, x_sf)", "ceil(hidden / 128)"]),
    "x one-dimensional": (dict(x=torch.zeros(H, dtype=BF16)), ValueError, ["x has shape [128]", "[tokens, hidden]"]),
    "x hidden": (dict(x=torch.zeros(T, 64, dtype=BF16)), ValueError, ["x has shape [5, 64]", "= [5, 128]"]),
    "x too long": (
        dict(x=torch.zeros(201, H, dtype=BF16)),
        ValueError,
        ["201 tokens", "max_tokens_per_rank = 200", "create the buffer for more"],
    ),
    "x device": (dict(x=torch.zeros(T, H, dtype=BF16, device="meta")), ValueError, ["x is on meta", "cpu", ".to("]),
    "x columns": (
        dict(x=torch.zeros(H, T, dtype=BF16).T),
        ValueError,
        ["x has strides (1, 5)", "contiguous", ".contiguous()"],
    ),
    "x rows overlap": (
        dict(x=torch.zeros(8 * T + H, dtype=BF16).as_strided((T, H), (8, 1))),
        ValueError,
        ["x has rows that overlap"],
    ),
    "x alignment": (
        dict(x=torch.zeros(T * H + 1, dtype=BF16)[1:].view(T, H)),
        ValueError,
        ["x starts at address", "multiples of 16 bytes", "copy"],
    ),
    "x row alignment": (dict(x=torch.zeros(T, H + 4, dtype=BF16)[:, :H]), ValueError, ["264 bytes between rows"]),
    "x_sf dtype": (dict(x=(e4m3(), torch.ones(T, 1).half())), ValueError, ["x[1] has dtype torch.float16", "float32"]),
    "x_sf shape": (dict(x=(e4m3(), torch.ones(T, 2))), ValueError, ["x[1] has shape [5, 2]", "[5, 1]"]),
    "x pair of bf16": (
        dict(x=(torch.zeros(T, H, dtype=BF16), torch.ones(T, 1))),
        ValueError,
        ["x[0] has dtype torch.bfloat16", "float8_e4m3fn"],
    ),
    "ids dtype": (dict(topk_idx=torch.zeros(T, K)), ValueError, ["topk_idx has dtype", "torch.int32 or torch.int64"]),
    "ids shape": (
        dict(topk_idx=torch.zeros(T, 3, dtype=torch.int32)),
        ValueError,
        ["topk_idx has shape [5, 3]", "num_topk", "[5, 1]"],
    ),
    "ids rows": (dict(topk_idx=torch.zeros(4, K, dtype=torch.int64)), ValueError, ["topk_idx has shape [4, 1]"]),
    "weights dtype": (dict(topk_weights=torch.ones(T, K).double()), ValueError, ["topk_weights has dtype", "float32"]),
    "weights none": (dict(topk_weights=None), TypeError, ["topk_weights is a NoneType"]),
    "count on the host": (dict(num_tokens=3), TypeError, ["num_tokens is a int", "int32", "x[:n]"]),
    "count dtype": (dict(num_tokens=torch.tensor(3)), ValueError, ["num_tokens has dtype torch.int64", "torch.int32"]),
    "count shape": (
        dict(num_tokens=torch.zeros(2, dtype=torch.int32)),
        ValueError,
        ["num_tokens has shape [2]", "one int32"],
    ),
    "factor": (
        dict(routed_scaling_factor=float("nan")),
        ValueError,
        ["routed_scaling_factor is nan", "a finite number"],
    ),
    "factor is a tensor": (dict(routed_scaling_factor=torch.ones(1)), ValueError, ["routed_scaling_factor is tensor"]),
}


@pytest.mark.parametrize("change, error, words", WRONG_STAGE.values(), ids=WRONG_STAGE.keys())
def test_stage_refuses(rank, change, error, words):
    before = rank.buffer.field("header").clone()
    with pytest.raises(error) as caught:
        deep_moe.stage(rank.buffer, **staged(**change))
    for word in words:
        assert word in str(caught.value)
    assert torch.equal(rank.buffer.field("header"), before)
    assert rank.buffer.staged_tokens == T


def test_stage_needs_a_buffer():
    with pytest.raises(TypeError, match="buffer is a NoneType.*SymmBuffer"):
        deep_moe.stage(None, **staged())


@pytest.mark.parametrize("bad", [-2, E, 1 << 20])
def test_checked_mode_names_token_and_slot(rank, bad, monkeypatch):
    idx = torch.zeros(T, K, dtype=torch.int64)
    idx[0, 0], idx[3, 0] = -1, bad
    for check in (True, None):
        monkeypatch.setattr(rank.buffer, "check_ids", not check)
        with pytest.raises(ValueError, match=rf"topk_idx\[3, 0\] is {bad} \(token 3, slot 0\).*\[0, {E}\).*-1"):
            deep_moe.stage(rank.buffer, **staged(topk_idx=idx), check=check)
    deep_moe.stage(rank.buffer, **staged(topk_idx=idx), check=False)
    assert rank.buffer.topk_idx[:T, 0].tolist() == [-1, 0, 0, -1, 0]
    beyond = torch.tensor(3, dtype=torch.int32)  # padding rows may hold anything
    deep_moe.stage(rank.buffer, **staged(topk_idx=idx, num_tokens=beyond), check=True)


def test_check_variable(worlds, monkeypatch):
    group, problem = deep_moe.LocalGroup(2, "cpu"), worlds("small").problem
    for text, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("DEEP_MOE_CHECK", text)
        buffers = group.run(lambda rank: deep_moe.SymmBuffer(rank, problem))
        assert [buffer.check_ids for buffer in buffers] == [expected] * 2
        group.run(lambda rank, buffers=buffers: buffers[rank.rank()].destroy())
    monkeypatch.setenv("DEEP_MOE_CHECK", "yes")
    with pytest.raises(ValueError, match="DEEP_MOE_CHECK is 'yes'; it must be 0 or 1"):
        deep_moe.SymmBuffer(None, problem, device="cpu")


def call(rank, **changes):
    """fp8_mega_moe of one rank alone with one argument changed: it must raise before it launches."""
    right = dict(y=torch.zeros(T, H, dtype=BF16), l1=rank.l1, l2=rank.l2, buffer=rank.buffer)
    deep_moe.fp8_mega_moe(**{**right, **changes})


STATS = "cumulative_local_expert_recv_stats"
WRONG_MEGA = {
    "y is no tensor": (dict(y=None), TypeError, ["y is a NoneType"]),
    "y dtype": (dict(y=torch.zeros(T, H)), ValueError, ["y has dtype torch.float32", "torch.bfloat16"]),
    "y hidden": (dict(y=torch.zeros(T, 64, dtype=BF16)), ValueError, ["y has shape [5, 64]", "[5, 128]"]),
    "y one-dimensional": (dict(y=torch.zeros(H, dtype=BF16)), ValueError, ["y has shape [128]", "[tokens, hidden]"]),
    "y too small": (dict(y=torch.zeros(4, H, dtype=BF16)), ValueError, ["y has 4 rows", "5 tokens were staged"]),
    "y too large": (dict(y=torch.zeros(6, H, dtype=BF16)), ValueError, ["y has 6 rows", "5 tokens were staged"]),
    "y device": (dict(y=torch.zeros(T, H, dtype=BF16, device="meta")), ValueError, ["y is on meta", "cpu"]),
    "y columns": (dict(y=torch.zeros(H, T, dtype=BF16).T), ValueError, ["y has strides", ".contiguous()"]),
    "y alignment": (
        dict(y=torch.zeros(T * H + 1, dtype=BF16)[1:].view(T, H)),
        ValueError,
        ["y starts at address", "multiples of 16 bytes"],
    ),
    "bound too small": (dict(num_tokens_bound=4), ValueError, ["num_tokens_bound is 4", "5 tokens were staged"]),
    "bound too large": (dict(num_tokens_bound=201), ValueError, ["num_tokens_bound is 201", "(200)"]),
    "bound negative": (dict(num_tokens_bound=-1), ValueError, ["num_tokens_bound is -1"]),
    "bound type": (dict(num_tokens_bound=8.0), ValueError, ["num_tokens_bound is 8.0", "an integer"]),
    "stats type": ({STATS: [0]}, TypeError, [STATS, "list"]),
    "stats dtype": ({STATS: torch.zeros(1)}, ValueError, [STATS, "torch.int32"]),
    "stats shape": ({STATS: torch.zeros(2, dtype=torch.int32)}, ValueError, [STATS, "[2]", "[1]"]),
    "l1 is a tensor": (dict(l1=torch.zeros(3)), TypeError, ["l1 is a Tensor", "transform_weights"]),
    "buffer": (dict(buffer=None), TypeError, ["buffer is a NoneType", "SymmBuffer"]),
}


@pytest.mark.parametrize("change, error, words", WRONG_MEGA.values(), ids=WRONG_MEGA.keys())
def test_mega_moe_refuses(rank, change, error, words):
    epoch = rank.buffer.field("header").clone()
    with pytest.raises(error) as caught:
        call(rank, **change)
    for word in words:
        assert word in str(caught.value)
    assert torch.equal(rank.buffer.field("header"), epoch)


def test_weights_in_the_wrong_order(rank):
    with pytest.raises(ValueError, match="l1 has kind 'l2'.*needs 'l1'.*in this order"):
        call(rank, l1=rank.l2, l2=rank.l1)


def other_weights(**changes):
    shape = dict(num_experts=1, num_topk=1, hidden=H, intermediate=128, max_tokens_per_rank=8)
    problem = deep_moe.Problem(**{**shape, **changes})
    weights = deep_moe.testing.random_weights(problem)
    return dict(zip(("l1", "l2"), deep_moe.transform_weights(problem, weights.gate_up, weights.down), strict=True))


def test_weights_of_another_layer(rank):
    with pytest.raises(ValueError, match="l1 has hidden 64, but this buffer needs 128"):
        call(rank, **other_weights(hidden=64))
    with pytest.raises(ValueError, match="l1 has intermediate 256, but this buffer needs 128"):
        call(rank, **other_weights(intermediate=256))
    with pytest.raises(ValueError, match="l1 has number of experts 2, but this buffer needs 1"):
        call(rank, **other_weights(num_experts=2))


@pytest.mark.parametrize("fact, value", [("mma_type", "fp8xmxfp4"), ("layout", "something-else")])
def test_weights_of_another_mma_type_or_layout(rank, fact, value):
    weights = other_weights()
    object.__setattr__(weights["l2"], fact, value)  # it is read-only
    with pytest.raises(ValueError, match=f"l2 has {fact} '{value}', but this buffer needs"):
        call(rank, **weights)


def test_a_good_call_still_works_afterwards(worlds):
    world = worlds("small")
    world.call_and_check(world.inputs([3, 2]))
