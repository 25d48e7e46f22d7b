"""e4m3 weights with a scale per 128x128 block: permuted and swizzled, as they will lie in shared memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .checks import check_matrix, check_mma_type, overlap
from .weight_format import BLOCK, GROUP, PAIR, QUAD, EncodingReport, Format, Matrix, scales_by_block

E4M3 = torch.float8_e4m3fn
VECTOR = 16  # bytes that the swizzle moves together
VECTORS = _C.kBlockK // VECTOR


def _blocks(extent: int) -> int:
    return -(-extent // BLOCK)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _check(
    name: str, values: Any, scales: Any, shape: Sequence[int], letters: tuple[str, str], device: Any
) -> tuple[Tensor, Tensor]:
    check_mma_type(name, values, (torch.uint8, torch.int8), "fp8xfp8", "fp8xmxfp4")
    check_matrix(name, values, shape, f"[experts, {letters[0]}, {letters[1]}]", device, E4M3)
    sf_shape = (shape[0], _blocks(shape[1]), _blocks(shape[2]))
    check_matrix(f"{name} scales", scales, sf_shape, "one per 128x128 block", device, torch.float32)
    return values, scales


def _by_channel(weight: Tensor, kind: str) -> Tensor:
    """A view [QUAD, PAIR, VECTORS, E, gate and up (l2: 1), row tiles, groups, chunks, K blocks, 16] of a weight.

    A channel's number is made of (row tiles, groups, QUAD, chunks, PAIR), that of K of (K blocks, VECTORS, 16), but for
    the swizzle.
    """
    halves, chunks = (2 if kind == "l1" else 1), GROUP[kind] // (QUAD * PAIR)
    rows = weight.unflatten(4, (VECTORS, VECTOR)).unflatten(3, (-1, chunks, halves, QUAD, PAIR))
    return rows.permute(6, 7, 8, 0, 5, 1, 3, 4, 2, 9)


def _swizzle(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Index into the first three of these dimensions, after which VECTORS are in the order of K."""
    lane, pair, vector = (torch.arange(size, device=device) for size in (QUAD, PAIR, VECTORS))
    lane, pair = lane[:, None, None], pair[:, None]
    return lane, pair, vector ^ (lane * PAIR + pair)  # which is the row's number modulo 8


def _place(target: Any, parts: Sequence[Matrix]) -> EncodingReport:
    """Expert by expert: target may be the memory of the parts."""
    copies = any(overlap(target.weight, part.values) for part in parts)
    swizzle = _swizzle(target.weight.device)
    by_channel = _by_channel(_bytes(target.weight), target.kind)
    for expert in range(target.num_local_experts):
        _place_expert(by_channel[:, :, :, expert], swizzle, [_bytes(part.values[expert]) for part in parts], copies)
    scales = scales_by_block(target.scales, target.kind, target.weight.shape[2])
    for half, part in enumerate(parts):
        blocks = scales[:, half]
        for block in range(blocks.shape[2]):  # of a tile; the last tile may lack the second
            rows = part.scales[:, block :: blocks.shape[2]]
            blocks[:, : rows.shape[1], block].copy_(rows)
    return EncodingReport()


def _place_expert(target: Tensor, swizzle: tuple[Tensor, ...], parts: Sequence[Tensor], copies: bool) -> None:
    tiles, groups, chunks, k_blocks = target.shape[4:8]
    rows, columns = tiles * groups * QUAD * chunks * PAIR, k_blocks * _C.kBlockK
    sources = [_whole_blocks(part, rows, columns, copies) for part in parts]  # all of them before the first is written
    for half, source in enumerate(sources):
        split = source.unflatten(1, (k_blocks, VECTORS, VECTOR)).unflatten(0, (tiles, groups, QUAD, chunks, PAIR))
        target[:, :, :, half][swizzle] = split.permute(2, 4, 6, 0, 1, 3, 5, 7)


def _whole_blocks(part: Tensor, rows: int, columns: int, copy: bool) -> Tensor:
    """A matrix padded with zeros to this size; itself where it has it, unless a copy is asked for."""
    if part.shape == (rows, columns):
        return part.clone() if copy else part
    padded = part.new_zeros(rows, columns)
    padded[: part.shape[0], : part.shape[1]].copy_(part)
    return padded


def _dequantize(weights: Any) -> Tensor:
    rows, columns = weights.matrix
    blocks = _by_channel(_bytes(weights.weight), weights.kind)[_swizzle(weights.weight.device)]
    natural = blocks.permute(3, 4, 5, 6, 0, 7, 1, 8, 2, 9).flatten(7, 9).flatten(2, 6).view(E4M3)
    scales = scales_by_block(weights.scales, weights.kind, weights.weight.shape[2]).flatten(2, 3)
    parts = zip(natural[:, :, :rows, :columns].unbind(1), scales.unbind(1), strict=True)
    return torch.cat([_scaled(part, part_scales) for part, part_scales in parts], dim=1)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """values [E, N, K] times scales [E, at least ceil(N/128), at least ceil(K/128)], in fp32."""
    rows, columns = values.shape[1:]
    wide = scales.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[:, :, :columns]
    return values.float() * wide


FORMAT = Format(
    layout=f"fp8-blocks{_C.kBlockN}x{_C.kBlockK}-swizzle128-groups{GROUP['l1']}x{GROUP['l2']}"
    f"-record{_C.kWeightScaleRecord}",
    dtype=E4M3,
    block=(_C.kBlockN, _C.kBlockK),
    pair="(e4m3 weights, fp32 block scales)",
    scale_rows=BLOCK,
    check=_check,
    check_exact=lambda matrix: None,  # nothing is rounded
    place=_place,
    dequantize=_dequantize,
)
