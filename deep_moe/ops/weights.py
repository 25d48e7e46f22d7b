"""transform_weights: from a checkpoint's expert weights to the bytes that every kernel variant reads.

The layout is that of include/deep_moe/layout/weights.h: gate and up rows interleaved by 8, and the block scales
gathered into records of four floats, one per 256 weight rows and 128 of K.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..config import Problem
from .checks import byte_range, check_device, check_dtype, check_matrix, check_shape, check_tensor, overlap

E4M3 = torch.float8_e4m3fn
BLOCK = _C.kScaleGroup
LAYOUT = f"fp8-interleave{_C.kInterleave}-n{_C.kBlockN}-record{_C.kWeightScaleRecord}"


def _blocks(extent: int) -> int:
    return -(-extent // BLOCK)


class TransformedWeights:
    """One of the two weight matrices of a layer, in kernel layout.

    Attributes:
        kind: "l1" (gate and up) or "l2" (down).
        weight: e4m3 [E_local, 2I, H] (l1, rows interleaved) or [E_local, H, I] (l2).
        scales: fp32 [E_local, row tiles, K blocks, 4].
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
        # Launch plans are kept by it: equal keys must mean the same bytes of the same layout.
        self.key = (weight.data_ptr(), scales.data_ptr(), kind, LAYOUT, problem.mma_type, *weight.shape)

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
        experts, rows, columns = self.weight.shape
        first, second = self.scales[..., 0], self.scales[..., 1]
        if self.kind == "l1":
            pairs = self.weight.view(experts, -1, 2, _C.kInterleave, columns)
            parts = [pairs[:, :, half].reshape(experts, rows // 2, columns) for half in (0, 1)]
            return torch.cat([_scaled(part, sf) for part, sf in zip(parts, (first, second), strict=True)], dim=1)
        scales = torch.stack([first, second], dim=2).flatten(1, 2)[:, : _blocks(rows)]
        return _scaled(self.weight, scales)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """values [E, N, K] times scales [E, ceil(N/128), ceil(K/128)], in fp32."""
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
            weights), or two e4m3 tensors [E_local, 2I, H] and [E_local, H, I]. They may be the memory of gate_up and of
            down, expert for expert, and must not overlap the inputs or each other in any other way.

    Returns:
        (l1, l2). Beyond it, the memory of one expert is needed for a moment.

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
    _interleave(l1.weight, gate, up)
    l1.scales[..., 0].copy_(gate_sf)
    l1.scales[..., 1].copy_(up_sf)
    if l2.weight.data_ptr() != down.data_ptr():
        _bytes(l2.weight).copy_(_bytes(down))
    l2.scales[..., 0].copy_(down_sf[:, 0::2])
    l2.scales[:, : _blocks(problem.hidden) // 2, :, 1].copy_(down_sf[:, 1::2])
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
    results = []
    given = (None, None) if out is None else _pair("out", out)
    for kind, item, rows, columns in zip(("l1", "l2"), given, (2 * i, h), (h, i), strict=True):
        name, shape = f"out[{('l1', 'l2').index(kind)}]", (experts, rows, columns)
        tiles = (experts, -(-rows // _C.kBlockN), _blocks(columns), _C.kWeightScaleRecord)
        if isinstance(item, TransformedWeights):
            if item.kind != kind or item.layout != LAYOUT:
                raise ValueError(f"{name} is {item.kind} in layout {item.layout}; it must be {kind} in {LAYOUT}")
            check_matrix(f"{name}.weight", item.weight, shape, "[experts, rows, K]", device, E4M3)
            check_matrix(f"{name}.scales", item.scales, tiles, "[experts, tiles, K blocks, 4]", device, torch.float32)
            results.append(item)
            continue
        weight = torch.empty(shape, dtype=E4M3, device=device) if item is None else item
        check_tensor(name, weight)
        check_dtype(name, weight, E4M3)
        check_device(name, weight, device)
        check_shape(name, weight, shape, "[experts, rows, K]")
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            raise ValueError(f"{name} has strides {weight.stride()}; it must be contiguous and 16-byte aligned")
        results.append(
            TransformedWeights(kind, weight, torch.zeros(tiles, dtype=torch.float32, device=device), problem)
        )
    return tuple(results)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _refuse_overlaps(gate: Tensor, up: Tensor, down: Tensor, l1: Tensor, l2: Tensor) -> None:
    """ValueError when writing a result would destroy an input that is still needed."""

    def inside_l1(part: Tensor) -> bool:  # part[e] lies in l1[e]: experts are read before they are written
        offset = part.data_ptr() - l1.data_ptr()
        return part.stride(0) == l1.stride(0) and 0 <= offset <= l1.stride(0) - part.stride(0) // 2

    for name, part, target, target_name, allowed in (
        ("gate", gate, l1, "out[0]", inside_l1(gate)),
        ("up", up, l1, "out[0]", inside_l1(up)),
        ("down", down, l2, "out[1]", down.data_ptr() == l2.data_ptr() and down.stride() == l2.stride()),
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


def _interleave(target: Tensor, gate: Tensor, up: Tensor) -> None:
    """Groups of 8 gate rows and 8 up rows in turns, one expert at a time: target may be the memory of gate and up."""
    copies = overlap(target, gate) or overlap(target, up)
    for expert in range(gate.shape[0]):
        rows = _bytes(target[expert]).view(-1, 2, _C.kInterleave, target.shape[2])
        halves = [_bytes(part[expert]) for part in (gate, up)]
        if copies:
            halves = [half.clone() for half in halves]
        for half, source in enumerate(halves):
            rows[:, half].copy_(source.reshape(-1, _C.kInterleave, target.shape[2]))
