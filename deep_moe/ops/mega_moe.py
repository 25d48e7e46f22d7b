"""fp8_mega_moe and fp8_mxfp4_mega_moe: the fused layer."""

from typing import Any

import torch
from torch import Tensor

from ..buffer import SymmBuffer
from .checks import check_matrix, check_outside, check_tensor, row_stride
from .weights import check_weights


def fp8_mega_moe(
    y: Tensor,
    l1: Any,
    l2: Any,
    buffer: SymmBuffer,
    num_tokens_bound: int | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
) -> None:
    """Runs the MoE layer on the staged tokens of all ranks. Collective, asynchronous on the current stream, capturable.

    Args:
        y: bf16 [T, H], written for the staged tokens that count; rows beyond the count are left untouched. T as in
            `stage`. Rows contiguous and 16-byte aligned, any row stride.
        l1, l2: from `transform_weights`, of this rank's experts.
        buffer: of this rank. The staged inputs survive the call.
        num_tokens_bound: the most tokens any rank has; must fall in the same class of `problem.bound_classes(ranks)` on
            all ranks. Default: max_tokens_per_rank.
        cumulative_local_expert_recv_stats: int32 [E_local]; the number of rows that each local expert received is
            added to it.

    Raises:
        TypeError, ValueError: an argument is wrong, or the buffer's mma_type is not "fp8xfp8"; nothing was launched.
        PeerTimeout, MismatchError: an earlier launch gave up (on the emulator: this one).
    """
    _launch("fp8xfp8", y, l1, l2, buffer, num_tokens_bound, cumulative_local_expert_recv_stats)


def fp8_mxfp4_mega_moe(
    y: Tensor,
    l1: Any,
    l2: Any,
    buffer: SymmBuffer,
    num_tokens_bound: int | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
) -> None:
    """The same layer with MXFP4 weights, which stay packed in memory: about half the weight traffic.

    `buffer` and `l1`, `l2` are of a problem with mma_type "fp8xmxfp4". Everything else as in `fp8_mega_moe`.
    """
    _launch("fp8xmxfp4", y, l1, l2, buffer, num_tokens_bound, cumulative_local_expert_recv_stats)


OPS = {"fp8xfp8": fp8_mega_moe, "fp8xmxfp4": fp8_mxfp4_mega_moe}  # by mma_type


def _launch(mma_type: str, y: Any, l1: Any, l2: Any, buffer: Any, num_tokens_bound: Any, stats: Any) -> None:
    if type(buffer) is not SymmBuffer:
        raise TypeError(f"buffer is a {type(buffer).__name__}; it must be a deep_moe.SymmBuffer")
    if buffer.problem.mma_type != mma_type:
        theirs = buffer.problem.mma_type
        raise ValueError(
            f"buffer is of a problem with mma_type {theirs!r}, and {OPS[mma_type].__name__} is for {mma_type!r}; "
            f"call deep_moe.{OPS[theirs].__name__}"
        )
    variant = buffer.variant_of(num_tokens_bound)
    try:
        plan = buffer.plans[l1.key, l2.key, variant]
    except (AttributeError, KeyError):
        plan = _new_plan(l1, l2, buffer, variant)
    rows, stride = _output(y, buffer, num_tokens_bound)
    buffer.launch_mega(plan, y.data_ptr(), stride, rows, 0 if stats is None else _stats(stats, buffer))


def _new_plan(l1: Any, l2: Any, buffer: SymmBuffer, variant: int) -> Any:
    """The first call with these weights: everything that cannot change later is checked here."""
    buffer.check_usable()
    check_weights("l1", l1, buffer)
    check_weights("l2", l2, buffer)
    return buffer.make_plan(l1, l2, variant)


def _output(y: Any, buffer: SymmBuffer, num_tokens_bound: int | None) -> tuple[int, int]:
    """Rows of y, and bytes between them."""
    staged, problem = buffer.staged_tokens, buffer.problem
    if type(y) is not Tensor:
        check_tensor("y", y)
    rows = y.shape[0] if y.dim() == 2 else 0
    columns = problem.hidden
    if y.dtype is not torch.bfloat16 or y.device != buffer.device or y.shape != (rows, columns):
        check_matrix("y", y, (rows, columns), "[tokens, hidden]", buffer.device, torch.bfloat16)
    if staged is None:
        if rows > problem.max_tokens_per_rank:
            raise ValueError(f"y has {rows} rows; the buffer holds at most {problem.max_tokens_per_rank} tokens")
    elif rows != staged:
        raise ValueError(f"y has {rows} rows, but {staged} tokens were staged; it must have one row per staged token")
    elif num_tokens_bound is not None and staged > num_tokens_bound:
        raise ValueError(
            f"num_tokens_bound is {num_tokens_bound}, but {staged} tokens were staged; pass a bound that holds the "
            "tokens of every rank"
        )
    check_outside("y", y.data_ptr(), buffer)
    return rows, row_stride("y", y, vectorised=True)


def _stats(stats: Any, buffer: SymmBuffer) -> int:
    name, local = "cumulative_local_expert_recv_stats", buffer.problem.num_experts // buffer.num_ranks
    check_matrix(name, stats, (local,), "[experts of this rank]", buffer.device, torch.int32)
    if not stats.is_contiguous():
        raise ValueError(f"{name} has stride {stats.stride()}; it must be contiguous")
    check_outside(name, stats.data_ptr(), buffer)
    return stats.data_ptr()
