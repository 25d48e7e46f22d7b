"""transform_weights: from a checkpoint's expert weights to the bytes that every kernel variant reads.

The layout is that of include/deep_moe/layout/weights.h: blocks of 256 rows and 128 of K, each as it will lie in shared
memory, rows permuted so that what a lane holds of an accumulator are adjacent channels, gate and up in turns; and the
block scales gathered into pairs, one per block.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..config import Problem
from .checks import byte_range, check_device, check_dtype, check_matrix, check_tensor, overlap

E4M3 = torch.float8_e4m3fn
BLOCK = _C.kScaleGroup
GROUP = {"l1": _C.kL1GroupChannels, "l2": _C.kL2GroupChannels}  # channels that a quad of lanes holds together
LAYOUT = (
    f"fp8-blocks{_C.kBlockN}x{_C.kBlockK}-swizzle128-groups{GROUP['l1']}x{GROUP['l2']}-record{_C.kWeightScaleRecord}"
)
PADDED = "[experts, row tiles, K blocks, 256, 128], rows and K padded to whole blocks,"

QUAD = 4  # lanes that share the 8 columns of an accumulator chunk
PAIR = 2  # adjacent columns of a lane in each chunk
VECTOR = 16  # bytes that the swizzle moves together
VECTORS = _C.kBlockK // VECTOR


def _blocks(extent: int) -> int:
    return -(-extent // BLOCK)


class TransformedWeights:
    """One of the two weight matrices of a layer, in kernel layout.

    Attributes:
        kind: "l1" (gate and up) or "l2" (down).
        weight: e4m3 [E_local, row tiles, K blocks, 256, 128], rows permuted, vectors of 16 bytes swizzled. Rows (l1:
            2I, l2: H) are padded to 256 and K (l1: H, l2: I) to 128, with zeros.
        scales: fp32 [E_local, row tiles, K blocks padded to an even number, 2].
        layout: names the byte layout; kernels of another layout refuse it.
        mma_type, hidden, intermediate, num_local_experts.
    """

    __slots__ = ("kind", "weight", "scales", "layout", "mma_type", "hidden", "intermediate", "num_local_experts", "key")

    def __init__(self, kind: str, weight: Tensor, scales: Tensor, problem: Problem) -> None:
        self.kind = kind
        self.weight = weight
        self.scales = scales
        self.layout = LAYOUT
        self.mma_type = problem.mma_type
        self.hidden = problem.hidden
        self.intermediate = problem.intermediate
        self.num_local_experts = weight.shape[0]
        # Launch plans are kept by it: equal keys must mean the same bytes of the same layout. Shapes have sizes padded.
        sizes = (problem.hidden, problem.intermediate, self.num_local_experts)
        self.key = (weight.data_ptr(), scales.data_ptr(), kind, LAYOUT, problem.mma_type, *sizes)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "key"):
            raise AttributeError(
                f"{name} of TransformedWeights cannot be changed: launch plans hold the addresses; write new weights "
                "into the same memory with transform_weights(..., out=(l1, l2))"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"TransformedWeights({self.kind}, {list(self.weight.shape)}, {self.layout}, {self.weight.device})"

    def dequantize(self) -> Tensor:
        """fp32 in the natural layout: [E_local, 2I, H] with the gate rows first (l1), [E_local, H, I] (l2)."""
        first, second = self.scales[..., 0], self.scales[..., 1]
        rows, columns = self.intermediate, self.hidden
        if self.kind == "l2":
            rows, columns = columns, rows
        blocks = _by_channel(_bytes(self.weight), self.kind)[_swizzle(self.weight.device)]
        natural = blocks.permute(3, 4, 5, 6, 0, 7, 1, 8, 2, 9).flatten(7, 9).flatten(2, 6).view(E4M3)
        parts = natural[:, :, :rows, :columns].unbind(1)
        if self.kind == "l1":
            return torch.cat([_scaled(parts[0], first), _scaled(parts[1], second)], dim=1)
        return _scaled(parts[0], torch.stack([first, second], dim=2).flatten(1, 2))


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


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """values [E, N, K] times scales [E, at least ceil(N/128), at least ceil(K/128)], in fp32."""
    rows, columns = values.shape[1:]
    wide = scales.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[:, :, :columns]
    return values.float() * wide


def transform_weights(
    problem: Problem, gate_up: Any, down: Any, out: Any = None
) -> tuple[TransformedWeights, TransformedWeights]:
    """Weights of one layer in kernel layout. Local; on the weights' device; once per layer.

    Args:
        problem: the layer.
        gate_up: (e4m3 [E_local, 2I, H], fp32 [E_local, 2I/128, ceil(H/128)]) with the gate rows first; or gate and up
            apart, ((e4m3 [E_local, I, H], fp32 [E_local, ceil(I/128), ceil(H/128)]), (the same for up)), which is
            needed when I is not a multiple of 128. Scales are multipliers of 128x128 blocks.
        down: (e4m3 [E_local, H, I], fp32 [E_local, ceil(H/128), ceil(I/128)]).
        out: storage to reuse: the (l1, l2) of an earlier call, whose addresses then stay (captured graphs see the new
            weights), or two contiguous, 16-byte aligned e4m3 tensors of any shape with E_local * (2I padded to 256) *
            (H padded to 128) and E_local * (H padded to 256) * (I padded to 128) elements. They may be the memory of
            gate_up (in one tensor, unless padding makes the result larger) and of down, expert for expert, and must not
            overlap the inputs or each other in any other way.

    Returns:
        (l1, l2). Beyond it, the memory of one expert's larger matrix is needed for a moment. Rows are padded to 256 and
        K to 128, which costs memory and the time to read it unless H is a multiple of 256 and I of 128. Example: with
        H = I = 2880, l1 (5760 x 2880) becomes 5888 x 2944, 4 % more, and l2 (2880 x 2880) 3072 x 2944, 9 % more.

    Raises:
        TypeError: not a tensor, or not a pair. ValueError: shape, dtype, device or layout.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem is a {type(problem).__name__}; it must be a deep_moe.Problem")
    (gate, gate_sf), (up, up_sf) = _gate_and_up(problem, gate_up)
    down, down_sf = _pair("down", down)
    experts, device = gate.shape[0], gate.device
    shape = (experts, problem.hidden, problem.intermediate)
    _check_block_scaled("down", down, down_sf, shape, "[experts, H, I]", device)
    l1, l2 = _storage(problem, experts, device, out)
    _refuse_overlaps(gate, up, down, l1.weight, l2.weight)
    _place(l1, gate, up)
    _place(l2, down)
    h_blocks, i_blocks = _blocks(problem.hidden), _blocks(problem.intermediate)
    l1.scales[:, :, :h_blocks, 0].copy_(gate_sf)
    l1.scales[:, :, :h_blocks, 1].copy_(up_sf)
    l2.scales[:, :, :i_blocks, 0].copy_(down_sf[:, 0::2])
    l2.scales[:, : h_blocks // 2, :i_blocks, 1].copy_(down_sf[:, 1::2])
    return l1, l2


def check_weights(name: str, weights: Any, buffer: Any) -> None:
    """TypeError or ValueError unless `weights` is what fp8_mega_moe needs as its argument `name` ("l1" or "l2")."""
    if not isinstance(weights, TransformedWeights):
        raise TypeError(f"{name} is a {type(weights).__name__}; it must come from deep_moe.transform_weights")
    problem = buffer.problem
    facts = (
        ("kind", weights.kind, name),
        ("layout", weights.layout, LAYOUT),
        ("mma_type", weights.mma_type, problem.mma_type),
        ("hidden", weights.hidden, problem.hidden),
        ("intermediate", weights.intermediate, problem.intermediate),
        ("number of experts", weights.num_local_experts, problem.num_experts // buffer.num_ranks),
    )
    for what, found, needed in facts:
        if found != needed:
            raise ValueError(
                f"{name} has {what} {found!r}, but this buffer needs {needed!r}: transform the weights of this rank's "
                "experts with the buffer's problem, and pass l1 and l2 in this order"
            )
    check_device(f"{name}.weight", weights.weight, buffer.device)
    check_device(f"{name}.scales", weights.scales, buffer.device)


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a pair (e4m3 weights, fp32 block scales)")
    return value[0], value[1]


def _gate_and_up(problem: Problem, gate_up: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Checked; apart in any case (views)."""
    first, second = _pair("gate_up", gate_up)
    h, i = problem.hidden, problem.intermediate
    if not isinstance(first, Tensor):
        parts = _pair("gate_up[0] (gate)", first), _pair("gate_up[1] (up)", second)
        gate = parts[0][0]
        check_tensor("gate", gate)
        experts, device = gate.shape[0] if gate.dim() else 0, gate.device
        for name, (values, scales) in zip(("gate", "up"), parts, strict=True):
            _check_block_scaled(name, values, scales, (experts, i, h), "[experts, I, H]", device)
    else:
        if i % BLOCK:
            raise ValueError(
                f"gate_up is one tensor, but intermediate is {i}, which is not a multiple of {BLOCK}: one scale block "
                "would hold gate and up rows. Pass ((gate, gate_sf), (up, up_sf)), each with its own block scales"
            )
        experts, device = first.shape[0] if first.dim() else 0, first.device
        _check_block_scaled("gate_up", first, second, (experts, 2 * i, h), "[experts, 2I, H]", device)
        blocks = i // BLOCK
        parts = (first[:, :i], second[:, :blocks]), (first[:, i:], second[:, blocks:])
    if experts < 1 or problem.num_experts % experts:
        raise ValueError(
            f"gate_up holds {experts} experts; the ranks of this problem hold num_experts / ranks each, a divisor of "
            f"{problem.num_experts}: pass the experts of this rank"
        )
    return parts


def _check_block_scaled(name: str, values: Any, scales: Any, shape: Sequence[int], what: str, device: Any) -> None:
    check_matrix(name, values, shape, what, device, E4M3)
    sf_shape = (shape[0], _blocks(shape[1]), _blocks(shape[2]))
    check_matrix(f"{name} scales", scales, sf_shape, "one per 128x128 block", device, torch.float32)


def _storage(problem: Problem, experts: int, device: torch.device, out: Any) -> tuple[TransformedWeights, ...]:
    """The result objects: new, or on the storage of `out`."""
    h, i = problem.hidden, problem.intermediate
    first, second = (None, None) if out is None else _pair("out", out)
    l1 = _result("l1", "out[0]", first, problem, experts, (2 * i, h), device)
    l2 = _result("l2", "out[1]", second, problem, experts, (h, i), device)
    return l1, l2


def _result(
    kind: str, name: str, item: Any, problem: Problem, experts: int, matrix: tuple[int, int], device: torch.device
) -> TransformedWeights:
    """One of them; item: None, or one of `out`, then called `name`. matrix: rows and K of an expert."""
    tiles, k_blocks = -(-matrix[0] // _C.kBlockN), -(-matrix[1] // _C.kBlockK)
    shape = (experts, tiles, k_blocks, _C.kBlockN, _C.kBlockK)
    sf_shape = (experts, tiles, _C.scale_records(k_blocks), _C.kWeightScaleRecord)
    if isinstance(item, TransformedWeights):
        if item.kind != kind or item.layout != LAYOUT:
            raise ValueError(f"{name} is {item.kind} in layout {item.layout}; it must be {kind} in {LAYOUT}")
        for size in ("hidden", "intermediate"):  # shapes have them padded
            if getattr(item, size) != getattr(problem, size):
                raise ValueError(f"{name} has {size} {getattr(item, size)}; it must have {getattr(problem, size)}")
        check_matrix(f"{name}.weight", item.weight, shape, PADDED, device, E4M3)
        check_matrix(f"{name}.scales", item.scales, sf_shape, "[experts, tiles, records, 2]", device, torch.float32)
        return item
    memory = torch.empty(shape, dtype=E4M3, device=device) if item is None else item
    check_tensor(name, memory)
    check_dtype(name, memory, E4M3)
    check_device(name, memory, device)
    if memory.numel() != math.prod(shape):
        raise ValueError(
            f"{name} has {memory.numel()} elements (shape {list(memory.shape)}); it must have {math.prod(shape)}: "
            f"{PADDED} = {list(shape)}, for matrices {list(matrix)}"
        )
    if not memory.is_contiguous() or memory.data_ptr() % 16:
        raise ValueError(f"{name} has strides {memory.stride()}; it must be contiguous and 16-byte aligned")
    scales = torch.zeros(sf_shape, dtype=torch.float32, device=device)
    return TransformedWeights(kind, memory.view(shape), scales, problem)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _refuse_overlaps(gate: Tensor, up: Tensor, down: Tensor, l1: Tensor, l2: Tensor) -> None:
    """ValueError when writing a result would destroy an input that is still needed."""

    def inside(part: Tensor, target: Tensor) -> bool:  # part[e] in target[e]: experts are read before they are written
        (begin, end), (first, last) = byte_range(part[0]), byte_range(target[0])
        return part.stride(0) == target.stride(0) and first <= begin and end <= last

    for name, part, target, target_name, allowed in (
        ("gate", gate, l1, "out[0]", inside(gate, l1)),
        ("up", up, l1, "out[0]", inside(up, l1)),
        ("down", down, l2, "out[1]", inside(down, l2)),
        ("gate", gate, l2, "out[1]", False),
        ("up", up, l2, "out[1]", False),
        ("down", down, l1, "out[0]", False),
        ("out[0]", l1, l2, "out[1]", False),
    ):
        if not allowed and overlap(part, target):
            raise ValueError(
                f"{target_name} at {byte_range(target)} overlaps {name} at {byte_range(part)}; out may be the "
                "memory of gate_up and down, expert for expert, or must be memory of its own"
            )


def _place(target: TransformedWeights, *parts: Tensor) -> None:
    """Parts (gate and up, or down) to their places, expert by expert: target may be the memory of the parts."""
    copies = any(overlap(target.weight, part) for part in parts)
    swizzle = _swizzle(target.weight.device)
    by_channel = _by_channel(_bytes(target.weight), target.kind)
    for expert in range(target.num_local_experts):
        _place_expert(by_channel[:, :, :, expert], swizzle, [_bytes(part[expert]) for part in parts], copies)


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
