"""The expert-parallel MoE layer in plain torch, grouped by expert. See the package docstring for what is what."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deep_moe.reference.activation import Activation
from deep_moe.reference.mxfp4 import encode_mxfp4
from deep_moe.reference.quant import GROUP, dequantize_blocks, dequantize_rows, quantize_rows

# (e4m3 [E, N, K], f32 [E, ceil(N/128), ceil(K/128)]), or what `dequantize_mxfp4` takes
Scaled = tuple[Tensor, Tensor]
GateUp = Scaled | tuple[Scaled, Scaled]
SWIGLU = Activation()


class Biases(NamedTuple):
    """Of all E experts, in any float dtype; the layer uses them in fp32."""

    gate: Tensor  # [E, I]
    up: Tensor  # [E, I]
    down: Tensor  # [E, H]


class Staged(NamedTuple):
    """One rank's inputs as the symmetric buffer holds them."""

    x: Tensor  # e4m3 [T, H]
    x_sf: Tensor  # f32 [T, ceil(H/128)]
    topk_idx: Tensor  # i32 [T, K], -1 = no expert
    topk_weights: Tensor  # f32 [T, K], times routed_scaling_factor


def stage(
    x: Tensor | Scaled, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, routed_scaling_factor: float = 1.0
) -> Staged:
    """Quantise and sanitise one rank's inputs.

    Args:
        x: bf16 [T, H], or already quantised (e4m3 [T, H], f32 [T, ceil(H/128)]).
        topk_idx: int32 or int64 [T, K]; anything outside [0, num_experts) becomes -1.
        topk_weights: f32 [T, K].
    """
    q, sf = x if isinstance(x, tuple) else quantize_rows(x)
    known = (topk_idx >= 0) & (topk_idx < num_experts)
    return Staged(q, sf, torch.where(known, topk_idx, -1).to(torch.int32), topk_weights * routed_scaling_factor)


def split_gate_up(gate_up: GateUp) -> tuple[Scaled, Scaled]:
    """(gate, up), each a pair for [E, I, H].

    `gate_up` is either that already, or one pair for [E, 2I, H] with the gate rows first, which needs I % 128 == 0
    where scales are of blocks: otherwise one scale block would span gate and up.
    """
    if isinstance(gate_up[0], tuple):
        return gate_up
    q, sf = gate_up
    rows = q.shape[1] // 2
    if q.dtype is not torch.float8_e4m3fn:
        return (q[:, :rows], sf[:, :rows]), (q[:, rows:], sf[:, rows:])
    if rows % GROUP:
        raise ValueError(f"gate_up has intermediate {rows}, not a multiple of {GROUP}: give gate and up apart")
    return (q[:, :rows], sf[:, : rows // GROUP]), (q[:, rows:], sf[:, rows // GROUP :])


def _operands(weights: Scaled, expert: int) -> Scaled:
    """(e4m3 [N, K], f32 [ceil(N/128), ceil(K/128)]): what an expert's tiles multiply."""
    q, sf = (part[expert : expert + 1] for part in weights)
    if q.dtype is not torch.float8_e4m3fn:
        q, sf = encode_mxfp4(q, sf)
    return q[0], sf[0]


def _rows_by_expert(topk_idx: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, tokens [n], slots [n]) for every expert that is used. Duplicates within a token are separate rows."""
    for expert in topk_idx.unique().tolist():
        if 0 <= expert < num_experts:
            tokens, slots = (topk_idx == expert).nonzero(as_tuple=True)
            yield expert, tokens, slots


def _scaled_gemm(a: Tensor, a_sf: Tensor, w: Tensor, w_sf: Tensor) -> Tensor:
    """a @ w.T in f32: partial sums of 128 of K, each scaled and added by one fma, in ascending order.

    a is e4m3 [M, K] with f32 [M, K/128]; w is e4m3 [N, K] with f32 [N/128, K/128]; all divisions rounded up.
    """
    rows, depth = a.shape
    acc = torch.zeros(rows, w.shape[0], dtype=torch.float32, device=a.device)
    a, w = a.float(), w.float()
    w_sf = w_sf.repeat_interleave(GROUP, 0)[: w.shape[0]]
    for block, start in enumerate(range(0, depth, GROUP)):
        partial = a[:, start : start + GROUP] @ w[:, start : start + GROUP].T
        acc.addcmul_(partial, a_sf[:, block, None] * w_sf[:, block])
    return acc


def layer(
    staged: Staged, gate_up: GateUp, down: Scaled, activation: Activation = SWIGLU, biases: Biases | None = None
) -> Tensor:
    """The MoE layer with the kernel's requantisation and roundings.

    Args:
        staged: T tokens, see `stage`.
        gate_up: weights of all E experts, see `split_gate_up`.
        down: a pair for [E, H, I].
        biases: those of gate and up are added to the fp32 sums before the clamp; that of down, times the top-k weight,
            to the fp32 sum before it is rounded into its slot.

    Returns:
        bf16 [T, H]; 0 for a token without experts.
    """
    gate, up = split_gate_up(gate_up)
    x, x_sf, topk_idx, topk_weights = staged
    (num_tokens, topk), hidden = topk_idx.shape, x.shape[1]
    slots = torch.zeros(topk, num_tokens, hidden, dtype=torch.bfloat16, device=x.device)
    for expert, tokens, slot in _rows_by_expert(topk_idx, gate[0].shape[0]):
        a, a_sf = _take(x, tokens), x_sf[tokens]
        weight = topk_weights[tokens, slot, None]
        sums = [_scaled_gemm(a, a_sf, *_operands(part, expert)) for part in (gate, up)]
        if biases is not None:
            sums = [acc + bias[expert].float() for acc, bias in zip(sums, biases[:2], strict=True)]
        a, a_sf = quantize_rows(activation(*sums) * weight)
        acc = _scaled_gemm(a, a_sf, *_operands(down, expert))
        if biases is not None:
            acc.addcmul_(weight, biases.down[expert].float())
        slots[slot, tokens] = acc.bfloat16()

    y = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=x.device)
    for k in range(topk):
        y = torch.where(topk_idx[:, k, None] >= 0, y + slots[k], y)
    return y.bfloat16()


def exact_layer(
    staged: Staged, gate_up: GateUp, down: Scaled, activation: Activation = SWIGLU, biases: Biases | None = None
) -> Tensor:
    """The same layer on the same quantised operands in float64, without requantisation and without rounding.

    Returns float64 [T, H].
    """
    gate, up = split_gate_up(gate_up)
    x = dequantize_rows(staged.x, staged.x_sf, torch.float64)
    y = torch.zeros_like(x)
    for expert, tokens, slot in _rows_by_expert(staged.topk_idx, gate[0].shape[0]):
        rows = x[tokens]
        sums = [rows @ dequantize_blocks(*_operands(part, expert), torch.float64).T for part in (gate, up)]
        if biases is not None:
            sums = [acc + bias[expert].double() for acc, bias in zip(sums, biases[:2], strict=True)]
        out = activation(*sums) @ dequantize_blocks(*_operands(down, expert), torch.float64).T
        if biases is not None:
            out += biases.down[expert].double()
        y.index_add_(0, tokens, out * staged.topk_weights[tokens, slot, None].double())
    return y


def recv_counts(topk_idx_of_ranks: Sequence[Tensor], num_experts: int) -> Tensor:
    """Rows that every expert receives from the (sanitised) ids of all ranks: i32 [num_experts]."""
    ids = torch.cat([idx.flatten() for idx in topk_idx_of_ranks])
    return torch.bincount(ids[ids >= 0].long(), minlength=num_experts).to(torch.int32)


def _take(q: Tensor, rows: Tensor) -> Tensor:
    """q[rows] for e4m3, which torch does not index on every device."""
    return q.view(torch.uint8)[rows].view(q.dtype)
