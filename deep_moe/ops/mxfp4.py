"""MXFP4 weights: e2m1 codes that stay at 4 bits, with exponents that let a kernel decode them to e4m3 exactly.

A checkpoint has an exponent per group of 32; the tensor core takes none. So the exponent is taken apart: a power of two
for a 128x128 block, which scales the accumulator as for FP8, and the rest, relative to it, which goes into the e4m3
number. e4m3 holds all of e2m1 * 2^r for r from -8 to 6, so blocks whose exponents span up to 15 binades are exact. The
largest gets 6: r of spans up to 12 are then at least -5, where no result is an e4m3 subnormal and decoding is cheaper.
Groups further down are rounded at -8, by value, and reported. Groups of zeros do not count; they get the r of the
largest.

The block's scale is never subnormal: where 6 would need less than 2^-126 the largest r is lower, down to -1, as the
smallest exponent of a checkpoint is -127. Values below 2^-126 are fp32 subnormals in any case.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .checks import check_device, check_dtype, check_matrix, check_mma_type, check_shape, check_tensor
from .weight_format import BLOCK, GROUP, PAIR, QUAD, EncodingReport, Format, Matrix, scales_by_block

E8M0 = torch.float8_e8m0fnu
SCALE_DTYPES = (torch.uint8, E8M0, torch.float32, torch.bfloat16, torch.float16)
NAN = 255  # as an e8m0 code
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7 (OCP MX 1.0); bit 3 is the sign

K_GROUP = _C.kMxfp4Group
GROUPS = BLOCK // K_GROUP  # of a row of a block
WARPS, ROWS_APART, WORD_ELEMENTS = 4, 2, 8  # of a piece; rows of a lane; codes of 32 bits
HALVES, IN_HALF = 2, 2  # of a K block; groups in each, and also its wgmmas, and the lanes of a quad with one group
# Of the words of codes: rows, then lanes of a quad, then a lane's words.
PIECE_SHAPE = (WARPS, ROWS_APART, QUAD * PAIR, IN_HALF, IN_HALF, HALVES, IN_HALF)

MAGNITUDES = 0x7777_7777_7777_7777  # of 16 codes
FIRST, SECOND = 0x0008_0008_0008_0008, 0x0800_0800_0800_0800  # bits 3 and 11 of four halves of words
TOP = _C.kMxfp4MaxExponent - _C.kMxfp4ExponentBias  # r of a block's largest exponent
VANISHED = 5  # binades below r = -8 at which 6 becomes zero, and so everything


class Encoded(NamedTuple):
    """One matrix of one expert, padded to whole tiles.

    low, high: int64 [rows, groups of 32 of K]; of every word of a group the low and the high half.
    exponents: u8 [rows, groups]. scales: fp32 [rows / 128, K blocks].
    """

    low: Tensor
    high: Tensor
    exponents: Tensor
    scales: Tensor
    report: EncodingReport


def _check(
    name: str, values: Any, scales: Any, shape: Sequence[int], letters: tuple[str, str], device: Any
) -> tuple[Tensor, Tensor]:
    """As (u8 [experts, rows, K/32, 16], scales)."""
    (experts, rows, columns), (n, k) = shape, letters
    check_tensor(name, values)
    check_mma_type(name, values, (torch.float8_e4m3fn,), "fp8xmxfp4", "fp8xfp8")
    check_dtype(name, values, torch.uint8, torch.int8)
    check_device(name, values, device)
    groups = columns // K_GROUP
    if values.dim() == 4:
        check_shape(name, values, (experts, rows, groups, K_GROUP // 2), f"[experts, {n}, {k}/{K_GROUP}, 16]")
    else:
        check_shape(name, values, (experts, rows, columns // 2), f"[experts, {n}, {k}/2]")
        values = values.unflatten(2, (groups, K_GROUP // 2))
    check_matrix(f"{name} scales", scales, (experts, rows, groups), f"one per {K_GROUP} of K", device, *SCALE_DTYPES)
    for expert in range(experts):
        _, known = _exponent_codes(scales[expert])
        if not bool(known.all()):
            _refuse_scale(f"{name} scales", scales, (expert, *(~known).nonzero()[0].tolist()))
    return values.view(torch.uint8), scales


def _refuse_scale(name: str, scales: Tensor, position: tuple[int, int, int]) -> None:
    where = f"{name}[expert, row, group] at {list(position)}"
    if not scales.dtype.is_floating_point or scales.dtype is E8M0:
        raise ValueError(
            f"{where} is the e8m0 code {NAN}, a NaN; codes are 0 to {NAN - 1}: check or reload this tensor"
        )
    raise ValueError(
        f"{where} is {float(scales[position])!r}; it must be a power of two from 2^-127 to 2^127: MXFP4 has no other "
        "scales, so quantise these weights again"
    )


def _exponent_codes(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of any of SCALE_DTYPES as e8m0 codes (u8), and which of them are what MXFP4 allows."""
    if scales.dtype in (torch.uint8, E8M0):
        codes = scales.view(torch.uint8)
        return codes, codes != NAN
    bits = scales.float().view(torch.int32)
    codes = bits >> 23  # e8m0 is the exponent field of fp32; only 2^-127, code 0, is a subnormal there
    normal = (codes > 0) & (codes < NAN) & (bits & 0x7FFFFF == 0)
    return codes.to(torch.uint8), normal | (bits == 1 << 22)


def _encode(part: Matrix, expert: int, rows: int, columns: int) -> Encoded:
    """Padded to this size with zeros."""
    codes, _ = _exponent_codes(part.scales[expert])
    shape, held = (rows, columns // K_GROUP), (slice(codes.shape[0]), slice(codes.shape[1]))
    packed = part.values.new_zeros(*shape, K_GROUP // 2)
    packed[held].copy_(part.values[expert])
    exponents = codes.new_zeros(shape, dtype=torch.int16)
    exponents[held].copy_(codes)

    blocks = exponents.view(rows // BLOCK, BLOCK, columns // BLOCK, GROUPS)
    empty = _empty(packed).view(blocks.shape)
    largest = blocks.masked_fill(empty, -1).amax((1, 3), keepdim=True)
    # Of the scale, biased as in fp32. A block of zeros keeps -1: its scale becomes 0, its relative exponents 0.
    base = torch.where(largest < 0, largest, (largest - TOP).clamp_min(1))
    stored = blocks - base + _C.kMxfp4ExponentBias
    too_far, report = (stored < 0) & ~empty, EncodingReport()
    if bool(too_far.any()):
        report = _round(packed, stored.view(shape), too_far.view(shape), f"{part.name}[{expert}]")
        empty = _empty(packed).view(blocks.shape)
    stored = torch.where(empty, largest - base + _C.kMxfp4ExponentBias, stored.clamp_min(0))
    scales = (base.clamp_min(0).to(torch.int32) << 23).view(torch.float32)[:, 0, :, 0]
    return Encoded(*_halves_of_words(packed), stored.view(shape).to(torch.uint8), scales, report)


def _empty(packed: Tensor) -> Tensor:
    """Which groups [rows, groups] hold zeros only, of either sign."""
    low, high = packed.view(torch.int64).unbind(2)
    return (low | high) & MAGNITUDES == 0


def _halves_of_words(packed: Tensor) -> tuple[Tensor, Tensor]:
    """From 16 bytes per group to the four words of the layout, their low and their high halves apart.

    Four codes of 16 bits are already where a half has their magnitudes: elements 0 to 3 those of the first and the
    third four bytes, 4 to 7 those of the others. Their signs are spread over both halves, in the order 4, 0, 5, 1 and
    6, 2, 7, 3.
    """
    pairs = packed.view(torch.int32).unflatten(2, (2, 2)).unbind(3)
    first, last = (each.contiguous().view(torch.int64).squeeze(2) for each in pairs)
    low = _two_signs(first) << 4
    low |= first & MAGNITUDES
    low |= _two_signs(last)
    high = _two_signs(first >> 8) << 4
    high |= last & MAGNITUDES
    high |= _two_signs(last >> 8)
    return low, high


def _two_signs(halves: Tensor) -> Tensor:
    """Bits 3 and 7 of every 16, moved to bits 3 and 11."""
    moved = halves << 4
    moved &= SECOND
    moved |= halves & FIRST
    return moved


def _round(packed: Tensor, stored: Tensor, too_far: Tensor, name: str) -> EncodingReport:
    """Rounds the groups that are `too_far` down to exponent 0, to nearest with ties to the even code, in place.

    By value: what is still a code there is kept, and not reported.
    """
    groups = packed.view(-1, K_GROUP // 2)
    where = too_far.flatten().nonzero().squeeze(1)
    shifts = (-stored.flatten()[where]).clamp_max(VANISHED).to(torch.int32)
    keys = ((shifts * 256)[:, None] + groups[where]).flatten()
    new, errors = (table.to(packed.device).index_select(0, keys).view(-1, K_GROUP // 2) for table in _rounding_tables())
    groups[where] = new
    errors = errors.amax(1)
    changed = where[errors > 0]
    if not len(changed):
        return EncodingReport()
    width = stored.shape[1]
    row_blocks, k_blocks = changed // width // BLOCK, changed % width // GROUPS
    row, k = int(row_blocks[0]) * BLOCK, int(k_blocks[0]) * BLOCK
    return EncodingReport(
        blocks=len((row_blocks * width + k_blocks).unique()),
        groups=len(changed),
        largest_error=float(errors.max()),
        first=f"{name}, block of rows {row} to {row + BLOCK - 1} and K {k} to {k + BLOCK - 1}",
    )


def _rounding_tables() -> tuple[Tensor, Tensor]:
    """By binades * 256 + byte: the byte of the two rounded codes, and the larger of their relative errors."""

    def rounded(code: int, binades: int) -> tuple[int, float]:
        value = math.ldexp(E2M1[code & 7], -binades)
        best = min(range(8), key=lambda other: (abs(E2M1[other] - value), other % 2))
        return code & 8 | best, abs(E2M1[best] - value) / value if value else 0.0

    codes = [[rounded(code, binades) for code in range(16)] for binades in range(VANISHED + 1)]
    pairs = [(each[byte & 15], each[byte >> 4]) for each in codes for byte in range(256)]
    new = torch.tensor([low[0] | high[0] << 4 for low, high in pairs], dtype=torch.uint8)
    return new, torch.tensor([max(low[1], high[1]) for low, high in pairs])


def _padded(weights: Any) -> tuple[int, int]:
    """Rows and K of an expert's gate, up or down as they lie in memory."""
    tiles, k_blocks = weights.weight.shape[1:3]
    return tiles * (BLOCK if weights.kind == "l1" else _C.kBlockN), k_blocks * BLOCK


def _check_exact(part: Matrix) -> None:
    experts, rows, groups, _ = part.values.shape
    report = EncodingReport()
    for expert in range(experts):
        report += _encode(part, expert, -(-rows // BLOCK) * BLOCK, -(-groups // GROUPS) * BLOCK).report
    if report.groups:
        raise ValueError(
            f"{part.name} cannot be encoded exactly: {report.groups} groups of 32 weights in {report.blocks} blocks of "
            f"128x128 would be rounded, by a relative error of up to {report.largest_error:.3g}; the first is "
            f"{report.first}. Their exponents are too far below the largest of the block; use strict=False to accept "
            "this error"
        )


def _place(target: Any, parts: Sequence[Matrix]) -> EncodingReport:
    rows, columns = _padded(target)
    halves, exponents = _codes(target, torch.int16), _exponents(target)
    scales = scales_by_block(target.scales, target.kind, target.weight.shape[2])
    total = EncodingReport()
    for expert in range(target.num_local_experts):
        encoded = [_encode(part, expert, rows, columns) for part in parts]  # before the first is written: see `out`
        for half, matrix in enumerate(encoded):
            to = exponents[expert, half]
            to.copy_(matrix.exponents.view(to.shape))
            for index, words in enumerate((matrix.low, matrix.high)):
                to = halves[expert, half, ..., index]
                to.copy_(words.view(torch.int16).view(to.shape))
            to = scales[expert, half]
            to.copy_(matrix.scales.view(to.shape))
            total += matrix.report
    return total


def _codes(weights: Any, dtype: torch.dtype) -> Tensor:
    """A view [E, gate and up (l2: 1), a channel's digits, K blocks, halves, groups, words (2, 2), parts of a word]."""
    codes = weights.weight.view(dtype)[..., : _C.kMxfp4CodeBytes // dtype.itemsize]
    pieces = codes.unflatten(4, (*PIECE_SHAPE, 4 // dtype.itemsize))
    return _by_channel(pieces.permute(*range(7), 9, 7, 10, 8, 11), weights.kind)


def _exponents(weights: Any) -> Tensor:
    """A view [E, gate and up (l2: 1), a channel's digits, K blocks, halves, groups]."""
    exponents = weights.weight[..., _C.kMxfp4CodeBytes :]
    pieces = exponents.unflatten(4, (WARPS, QUAD * PAIR, IN_HALF, ROWS_APART, HALVES))
    return _by_channel(pieces.permute(*range(5), 7, 5, 8, 6), weights.kind)


def _by_channel(pieces: Tensor, kind: str) -> Tensor:
    """From [E, row tiles, K blocks, pieces, warps, 2, 8, ...] to [E, gate and up, a channel's digits, K blocks, ...].

    The inverse of l1_row_of and l2_row_of. Channels count (tiles, groups, QUAD, chunks, PAIR); in l1 a piece has half
    the chunks of a group, gate and up rows in turns, in l2 it has two groups.
    """
    if kind == "l1":  # pieces: groups, halves of the chunks
        split = pieces.unflatten(6, (QUAD, PAIR)).unflatten(3, (-1, GROUP[kind] // (QUAD * PAIR) // WARPS))
        order = (0, 6, 1, 3, 7, 4, 5, 8, 2)
    else:  # warps: groups, halves of the chunks; the rows apart are adjacent chunks
        split = pieces.unflatten(6, (QUAD, PAIR)).unflatten(4, (-1, GROUP[kind] // (QUAD * PAIR) // ROWS_APART))
        order = (0, 1, 3, 4, 7, 5, 6, 8, 2)
    natural = split.permute(*order, *range(9, split.dim()))
    return natural if kind == "l1" else natural.unsqueeze(1)


def _dequantize(weights: Any) -> Tensor:
    (rows, columns), parts = weights.matrix, 2 if weights.kind == "l1" else 1
    words, exponents = _codes(weights, torch.int32)[..., 0], _exponents(weights)
    scales = scales_by_block(weights.scales, weights.kind, weights.weight.shape[2]).flatten(2, 3)
    shape = (weights.num_local_experts, parts * rows, columns)
    result = torch.empty(shape, dtype=torch.float32, device=weights.weight.device)
    padded_rows, _ = _padded(weights)
    for expert in range(weights.num_local_experts):
        for half in range(parts):
            values = _values(words[expert, half].reshape(padded_rows, -1, QUAD))
            powers = exponents[expert, half].reshape(padded_rows, -1).to(torch.int32) + (127 - _C.kMxfp4ExponentBias)
            values *= (powers << 23).view(torch.float32).repeat_interleave(K_GROUP, 1)
            values *= scales[expert, half].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            result[expert, half * rows : (half + 1) * rows] = values[:rows, :columns]
    return result


def _values(words: Tensor) -> Tensor:
    """fp32 [rows, K] of the codes in words [rows, groups, 4]: by which 16 of K, then by which four of eight."""
    table = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in E2M1])
    table = table.to(words.device, torch.float32)
    words = words.unflatten(2, (2, 2))
    elements = table.new_empty(*words.shape[:3], 2, 2, WORD_ELEMENTS // 2)
    for element in range(WORD_ELEMENTS):
        magnitude, sign = words >> 4 * element & 7, words >> _C.mxfp4_sign_bit_of(element) & 1
        elements[..., element // 4, :, element % 4] = table[magnitude | sign << 3]
    return elements.flatten(1)


FORMAT = Format(
    layout=f"mxfp4-fragments-in-turns{_C.kBlockN}x{_C.kBlockK}-piece{_C.kMxfp4PieceBytes}-groups{GROUP['l1']}x{GROUP['l2']}"
    f"-record{_C.kWeightScaleRecord}",
    dtype=torch.uint8,
    block=(_C.kMxfp4Pieces, _C.kMxfp4PieceBytes),
    pair=f"(e2m1 codes, one power of two per {K_GROUP} of K)",
    scale_rows=1,
    check=_check,
    check_exact=_check_exact,
    place=_place,
    dequantize=_dequantize,
)
