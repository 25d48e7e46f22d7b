"""stage: puts a rank's tokens into its symmetric buffer."""

from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..buffer import SymmBuffer
from .checks import check_dtype, check_matrix, check_outside, check_tensor, row_stride

_MAX_FP32 = torch.finfo(torch.float32).max


def stage(
    buffer: SymmBuffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_tokens: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    check: bool | None = None,
) -> None:
    """Stages T tokens for the next layer. Local, asynchronous on the current stream, capturable.

    Args:
        buffer: of this rank.
        x: bf16 [T, H], quantised here; or (e4m3 [T, H], fp32 [T, ceil(H/128)]) with one scale per token and 128
            channels. T from 0 to max_tokens_per_rank. Rows contiguous and 16-byte aligned, any row stride.
        topk_idx: int32 or int64 [T, K]: expert ids; anything outside [0, num_experts) means no expert.
        topk_weights: fp32 [T, K].
        num_tokens: int32 scalar on the device: how many of the T tokens count (default T). In a CUDA graph T is fixed
            and the count changes.
        routed_scaling_factor: multiplies topk_weights.
        check: raise for ids that are neither -1 nor in [0, num_experts); waits for the device. Default: what the
            environment variable DEEP_MOE_CHECK (0 or 1) said when the buffer was created, outside of graph captures.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        PeerTimeout, MismatchError: an earlier launch of this buffer gave up.
    """
    if type(buffer) is not SymmBuffer:
        raise TypeError(f"buffer is a {type(buffer).__name__}; it must be a deep_moe.SymmBuffer")
    buffer.check_usable()
    problem, device = buffer.problem, buffer.device
    tokens, *activations = _activations(buffer, x)
    shape = (tokens, problem.num_topk)
    check_matrix("topk_idx", topk_idx, shape, "[tokens of x, num_topk]", device, torch.int32, torch.int64)
    check_matrix("topk_weights", topk_weights, shape, "[tokens of x, num_topk]", device, torch.float32)
    count_ptr = 0 if num_tokens is None else _count(num_tokens, device)
    if not isinstance(routed_scaling_factor, (int, float)) or not abs(routed_scaling_factor) <= _MAX_FP32:
        raise ValueError(f"routed_scaling_factor is {routed_scaling_factor!r}; it must be a finite number (fp32)")
    if (buffer.check_ids if check is None else check) and _may_check(check, device):
        _check_ids(topk_idx, num_tokens, problem.num_experts)
    idx_stride = row_stride("topk_idx", topk_idx, vectorised=False)
    weights_stride = row_stride("topk_weights", topk_weights, vectorised=False)
    ids = (topk_idx.data_ptr(), idx_stride, topk_idx.dtype is torch.int64)
    weights = (topk_weights.data_ptr(), weights_stride)
    for name, address in (
        ("x", activations[0]),
        ("topk_idx", ids[0]),
        ("topk_weights", weights[0]),
        ("num_tokens", count_ptr),
    ):
        check_outside(name, address, buffer)
    buffer.launch_stage(_C.StageCall(*activations, *ids, *weights, count_ptr, tokens, routed_scaling_factor), tokens)


def _activations(buffer: SymmBuffer, x: Any) -> tuple[int, int, int, int, int]:
    """T, address and row stride of the [T, H] tensor, and those of its scales (0 without)."""
    device, problem = buffer.device, buffer.problem
    values, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    name = "x" if scales is None else "x[0]"
    check_tensor(name, values)
    if scales is None and values.dtype is torch.float8_e4m3fn:
        raise ValueError("x is e4m3 without scales; pass (x, x_sf) with fp32 x_sf [tokens, ceil(hidden / 128)]")
    tokens = values.shape[0] if values.dim() == 2 else 0
    dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    check_matrix(name, values, (tokens, problem.hidden), "[tokens, hidden]", device, dtype)
    if tokens > problem.max_tokens_per_rank:
        raise ValueError(
            f"{name} has {tokens} tokens; the buffer holds max_tokens_per_rank = {problem.max_tokens_per_rank}: "
            "stage fewer, or create the buffer for more"
        )
    x_stride = row_stride(name, values, vectorised=True)
    if scales is None:
        return tokens, values.data_ptr(), x_stride, 0, 0
    groups = -(-problem.hidden // _C.kScaleGroup)
    check_matrix("x[1]", scales, (tokens, groups), "[tokens, ceil(hidden / 128)]", device, torch.float32)
    return tokens, values.data_ptr(), x_stride, scales.data_ptr(), row_stride("x[1]", scales, vectorised=False)


def _count(num_tokens: Any, device: torch.device) -> int:
    if not isinstance(num_tokens, Tensor):
        raise TypeError(
            f"num_tokens is a {type(num_tokens).__name__}; it must be an int32 tensor with one element on {device} "
            "(to stage fewer tokens from the host, stage x[:n])"
        )
    check_dtype("num_tokens", num_tokens, torch.int32)
    if num_tokens.device != device or num_tokens.numel() != 1:
        raise ValueError(
            f"num_tokens has shape {list(num_tokens.shape)} on {num_tokens.device}; it must be one int32 on {device}"
        )
    return num_tokens.data_ptr()


def _may_check(check: bool | None, device: torch.device) -> bool:
    """False inside a graph capture, which cannot wait for the device; ValueError when the check was asked for there."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if check and capturing:
        raise ValueError("check is True inside a CUDA-graph capture, which cannot wait for the device; leave it out")
    return not capturing


def _check_ids(topk_idx: Tensor, num_tokens: Tensor | None, num_experts: int) -> None:
    ids = topk_idx if num_tokens is None else topk_idx[: max(0, int(num_tokens))]
    bad = ((ids < -1) | (ids >= num_experts)).nonzero()
    if len(bad):
        token, slot = bad[0].tolist()
        raise ValueError(
            f"topk_idx[{token}, {slot}] is {int(ids[token, slot])} (token {token}, slot {slot}); an expert id must be "
            f"in [0, {num_experts}), or -1 for no expert ({len(bad)} ids are wrong)"
        )
