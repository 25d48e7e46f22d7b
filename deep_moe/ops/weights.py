"""transform_weights: from a checkpoint's expert weights to the bytes that every kernel variant reads.

The layout is that of include/deep_moe/layout/weights.h: blocks of 256 rows and 128 of K, rows permuted so that what a
lane holds of an accumulator are adjacent channels, gate and up in turns; and the block scales gathered into pairs, one
per block. What differs between weight types is in their formats.
"""

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..config import Problem
from . import fp8, mxfp4
from .biases import bias_shape, checked_biases, natural_bias, place_bias
from .checks import byte_range, check_device, check_dtype, check_matrix, check_tensor, overlap
from .weight_format import EncodingReport, Format, Matrix

FORMATS = {"fp8xfp8": fp8.FORMAT, "fp8xmxfp4": mxfp4.FORMAT}


class TransformedWeights:
    """One of the two weight matrices of a layer, in kernel layout.

    Attributes:
        kind: "l1" (gate and up) or "l2" (down).
        weight: rows permuted; rows (l1: 2I, l2: H) are padded to 256 and K (l1: H, l2: I) to 128, with zeros.
            "fp8xfp8": e4m3 [E_local, row tiles, K blocks, 256, 128], vectors of 16 bytes swizzled.
            "fp8xmxfp4": u8 [E_local, row tiles, K blocks, 4, 4352], 64 rows each: 4096 bytes of codes in the order of
            register fragments, 256 bytes of exponents.
        scales: fp32 [E_local, row tiles, K blocks padded to an even number, 2].
        report: what the encoding could not keep (only ever anything for "fp8xmxfp4").
        bias: None where the problem has none; else fp32, channels in their natural order, l1: [E_local, row tiles, 128,
            2] (gate, up), l2: [E_local, row tiles, 256].
        layout: names the byte layout; kernels of another layout refuse it.
        mma_type, hidden, intermediate, num_local_experts.
    """

    __slots__ = (
        "kind",
        "weight",
        "scales",
        "bias",
        "report",
        "layout",
        "mma_type",
        "hidden",
        "intermediate",
        "num_local_experts",
        "key",
    )

    def __init__(self, kind: str, weight: Tensor, scales: Tensor, problem: Problem, bias: Tensor | None = None) -> None:
        self.kind = kind
        self.weight = weight
        self.scales = scales
        self.bias = bias
        self.report = EncodingReport()
        self.layout = FORMATS[problem.mma_type].layout
        self.mma_type = problem.mma_type
        self.hidden = problem.hidden
        self.intermediate = problem.intermediate
        self.num_local_experts = weight.shape[0]
        self.key = self._plan_key()

    def _plan_key(self) -> tuple:
        """Launch plans are kept by it: equal keys must mean the same bytes in the same layout. (Shapes are padded.)"""
        memory = (0 if part is None else part.data_ptr() for part in (self.weight, self.scales, self.bias))
        sizes = (self.hidden, self.intermediate, self.num_local_experts)
        return (*memory, self.kind, self.layout, self.mma_type, *sizes)

    def __deepcopy__(self, memo: dict) -> "TransformedWeights":
        copied = object.__new__(type(self))
        for name in self.__slots__:
            if name != "key":
                setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        copied.key = copied._plan_key()  # of its own memory
        return copied

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
        """fp32 in the natural layout: [E_local, 2I, H] with the gate rows first (l1), [E_local, H, I] (l2).

        Exactly what kernels multiply by. MXFP4 values of 2^128 and more, which fp32 does not have, are infinite.
        """
        return FORMATS[self.mma_type].dequantize(self)

    def natural_bias(self) -> Tensor | None:
        """fp32 [E_local, 2I] with gate first (l1), [E_local, H] (l2); None where the problem has no biases."""
        if self.bias is None:
            return None
        return natural_bias(self.kind, self.bias, self.intermediate if self.kind == "l1" else self.hidden)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and K of an expert's gate and of its up (l1), or of its down (l2)."""
        return (self.intermediate, self.hidden) if self.kind == "l1" else (self.hidden, self.intermediate)

    def _write(self, parts: Sequence[Matrix]) -> None:
        """New weights into this memory."""
        report = FORMATS[self.mma_type].place(self, parts)
        object.__setattr__(self, "report", report)  # the one thing that changes with the weights and not the address


@torch.no_grad()  # parameters may be passed; the result is no part of their graph
def transform_weights(
    problem: Problem,
    gate_up: Any,
    down: Any,
    out: Any = None,
    strict: bool = False,
    *,
    gate_up_bias: Any = None,
    down_bias: Any = None,
) -> tuple[TransformedWeights, TransformedWeights]:
    """Weights of one layer in kernel layout. Local; on the weights' device; once per layer.

    Args:
        problem: the layer.
        gate_up: a pair of weights [E_local, 2I, H] with the gate rows first and their scales; or gate and up apart,
            ((gate [E_local, I, H], gate_sf), (up, up_sf)).
            "fp8xfp8": e4m3, and fp32 [E_local, 2I/128, ceil(H/128)], multipliers of 128x128 blocks. Where I is not a
            multiple of 128 they must be apart, with scales [E_local, ceil(I/128), ceil(H/128)].
            "fp8xmxfp4": u8 or i8, two e2m1 codes a byte, the even column in the low four bits: [E_local, rows, K/2] or
            [E_local, rows, K/32, 16], any strides. Scales [E_local, rows, K/32], powers of two for 32 of K: u8 or
            float8_e8m0fnu, 2^(code - 127), or fp32, bf16 or fp16 values from 2^-127 to 2^127.
        down: a pair for [E_local, H, I].
        out: storage to reuse: the (l1, l2) of an earlier call, whose addresses then stay (captured graphs see the new
            weights), or two contiguous, 16-byte aligned tensors of any shape. With rows padded to 256 and K to 128 they
            have rows * K elements for each local expert, e4m3 ("fp8xfp8"), or rows * K * 17/32, u8 ("fp8xmxfp4"). They
            may be the memory of gate_up (in one tensor, unless padding makes the result larger) and of down, expert for
            expert, and must not overlap the inputs or each other in any other way. Biases are kept in memory of their
            own, whose address stays with (l1, l2).
        strict: refuse weights that the encoding would change. Costs a second encoding, before anything is written.
        gate_up_bias: needed when the problem has bias=True, and refused otherwise: fp32, bf16, fp16 or fp64 [E_local,
            2I] with gate first; or gate and up apart, a pair of [E_local, I] (gpt-oss, which has them in turns:
            (bias[:, 0::2], bias[:, 1::2])). Kept in fp32.
        down_bias: likewise, [E_local, H].

    Returns:
        (l1, l2). Beyond it, the memory of one expert's larger matrix is needed for a moment, or two and a half times
        that for "fp8xmxfp4" (more where many groups must be rounded). Rows are padded to 256 and K to 128, which costs
        memory and the time to read it unless H is a multiple of 256 and I of 128. Example: with H = I = 2880, l1 (5760
        x 2880) becomes 5888 x 2944, 4 % more, and l2 (2880 x 2880) 3072 x 2944, 9 % more.

        "fp8xfp8" keeps every weight. "fp8xmxfp4" keeps those of a 128x128 block (gate and up apart) whose exponents
        span up to 15 binades, groups of zeros left out. Groups further below the largest are rounded to nearest at its
        exponent - 14; a warning says how many there were, and so does `report` of the result. Warnings come last: where
        a filter makes an error of one, `out` holds the new weights all the same. Use `strict` to keep the old ones.

    Raises:
        TypeError: not a tensor, or not a pair. ValueError: shape, dtype, device or layout; a scale that MXFP4 does not
        have, with its position; with `strict`, weights that would be rounded.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem is a {type(problem).__name__}; it must be a deep_moe.Problem")
    form = FORMATS[problem.mma_type]
    gate, up = _gate_and_up(problem, form, gate_up)
    experts, device = gate.values.shape[0], gate.values.device
    shape = (experts, problem.hidden, problem.intermediate)
    down = Matrix("down", *form.check("down", *_pair("down", down, form.pair), shape, ("H", "I"), device))
    biases = checked_biases(problem, gate_up_bias, down_bias, experts, device)
    l1, l2 = _storage(problem, experts, device, out)
    _refuse_overlaps(gate, up, down, l1, l2)
    if strict:
        for matrix in (gate, up, down):
            form.check_exact(matrix)
    l1._write((gate, up))
    l2._write((down,))
    if biases is not None:
        place_bias(l1.bias, biases.gate_up)
        place_bias(l2.bias, biases.down)
    for result in (l1, l2):
        if result.report.groups:
            warnings.warn(f"{result.kind}: {result.report}", stacklevel=2)
    return l1, l2


def check_weights(name: str, weights: Any, buffer: Any) -> None:
    """TypeError or ValueError unless `weights` is what the layer needs as its argument `name` ("l1" or "l2")."""
    if not isinstance(weights, TransformedWeights):
        raise TypeError(f"{name} is a {type(weights).__name__}; it must come from deep_moe.transform_weights")
    problem = buffer.problem
    facts = (
        ("kind", weights.kind, name),
        ("mma_type", weights.mma_type, problem.mma_type),
        ("layout", weights.layout, FORMATS[problem.mma_type].layout),
        ("hidden", weights.hidden, problem.hidden),
        ("intermediate", weights.intermediate, problem.intermediate),
        ("number of experts", weights.num_local_experts, problem.num_experts // buffer.num_ranks),
        ("bias", weights.bias is not None, problem.bias),
    )
    for what, found, needed in facts:
        if found != needed:
            raise ValueError(
                f"{name} has {what} {found!r}, but this buffer needs {needed!r}: transform the weights of this rank's "
                "experts with the buffer's problem, and pass l1 and l2 in this order"
            )
    check_device(f"{name}.weight", weights.weight, buffer.device)
    check_device(f"{name}.scales", weights.scales, buffer.device)
    if weights.bias is not None:
        check_device(f"{name}.bias", weights.bias, buffer.device)


def _pair(name: str, value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a pair {what}")
    return value[0], value[1]


def _gate_and_up(problem: Problem, form: Format, gate_up: Any) -> tuple[Matrix, Matrix]:
    """Checked; apart in any case (views)."""
    first, second = _pair("gate_up", gate_up, form.pair)
    h, i = problem.hidden, problem.intermediate
    if not isinstance(first, Tensor):
        pairs = _pair("gate_up[0] (gate)", first, form.pair), _pair("gate_up[1] (up)", second, form.pair)
        check_tensor("gate", pairs[0][0])
        experts, device = _experts_of(pairs[0][0]), pairs[0][0].device
        parts = [
            form.check(name, *pair, (experts, i, h), ("I", "H"), device)
            for name, pair in zip(("gate", "up"), pairs, strict=True)
        ]
    else:
        if i % form.scale_rows:
            raise ValueError(
                f"gate_up is one tensor, but intermediate is {i}, which is not a multiple of {form.scale_rows}: one "
                "scale block would hold gate and up rows. Pass ((gate, gate_sf), (up, up_sf)), each with its own block "
                "scales"
            )
        experts, rows = _experts_of(first), i // form.scale_rows
        values, scales = form.check("gate_up", first, second, (experts, 2 * i, h), ("2I", "H"), first.device)
        parts = (values[:, :i], scales[:, :rows]), (values[:, i:], scales[:, rows:])
    if experts < 1 or problem.num_experts % experts:
        raise ValueError(
            f"gate_up holds {experts} experts; the ranks of this problem hold num_experts / ranks each, a divisor of "
            f"{problem.num_experts}: pass the experts of this rank"
        )
    gate, up = (Matrix(name, *part) for name, part in zip(("gate", "up"), parts, strict=True))
    return gate, up


def _experts_of(weights: Tensor) -> int:
    return weights.shape[0] if weights.dim() else 0


def _storage(problem: Problem, experts: int, device: torch.device, out: Any) -> tuple[TransformedWeights, ...]:
    """The result objects: new, or on the storage of `out`."""
    h, i = problem.hidden, problem.intermediate
    first, second = (None, None) if out is None else _pair("out", out, "(l1, l2)")
    l1 = _result("l1", "out[0]", first, problem, experts, (2 * i, h), device)
    l2 = _result("l2", "out[1]", second, problem, experts, (h, i), device)
    return l1, l2


def _result(
    kind: str, name: str, item: Any, problem: Problem, experts: int, matrix: tuple[int, int], device: torch.device
) -> TransformedWeights:
    """One of them; item: None, or one of `out`, then called `name`. matrix: rows and K of an expert."""
    form = FORMATS[problem.mma_type]
    tiles, k_blocks = -(-matrix[0] // _C.kBlockN), -(-matrix[1] // _C.kBlockK)
    shape = (experts, tiles, k_blocks, *form.block)
    words = f"{form.shape_words}, rows and K padded to whole blocks,"
    sf_shape = (experts, tiles, _C.scale_records(k_blocks), _C.kWeightScaleRecord)
    if isinstance(item, TransformedWeights):
        if item.kind != kind or item.layout != form.layout:
            raise ValueError(f"{name} is {item.kind} in layout {item.layout}; it must be {kind} in {form.layout}")
        for size in ("hidden", "intermediate"):  # shapes have them padded
            if getattr(item, size) != getattr(problem, size):
                raise ValueError(f"{name} has {size} {getattr(item, size)}; it must have {getattr(problem, size)}")
        if (item.bias is not None) != problem.bias:
            raise ValueError(
                f"{name} has bias {item.bias is not None}; it must be of a problem with bias={problem.bias}"
            )
        check_matrix(f"{name}.weight", item.weight, shape, words, device, form.dtype)
        check_matrix(f"{name}.scales", item.scales, sf_shape, "[experts, tiles, records, 2]", device, torch.float32)
        return item
    memory = torch.empty(shape, dtype=form.dtype, device=device) if item is None else item
    check_tensor(name, memory)
    check_dtype(name, memory, form.dtype)
    check_device(name, memory, device)
    if memory.numel() != math.prod(shape):
        raise ValueError(
            f"{name} has {memory.numel()} elements (shape {list(memory.shape)}); it must have {math.prod(shape)}: "
            f"{words} = {list(shape)}, for matrices {list(matrix)}"
        )
    if not memory.is_contiguous() or memory.data_ptr() % 16:
        raise ValueError(f"{name} has strides {memory.stride()}; it must be contiguous and 16-byte aligned")
    scales = torch.zeros(sf_shape, dtype=torch.float32, device=device)
    bias = torch.zeros(bias_shape(kind, experts, tiles), device=device, dtype=torch.float32) if problem.bias else None
    return TransformedWeights(kind, memory.view(shape), scales, problem, bias)


def _refuse_overlaps(gate: Matrix, up: Matrix, down: Matrix, l1: TransformedWeights, l2: TransformedWeights) -> None:
    """ValueError when writing a result would destroy an input that is still needed."""

    def inside(part: Tensor, target: Tensor) -> bool:  # part[e] in target[e]: experts are read before they are written
        (begin, end), (first, last) = byte_range(part[0]), byte_range(target[0])
        return part.stride(0) == target.stride(0) and first <= begin and end <= last

    def refuse(target_name: str, target: Tensor, name: str, part: Tensor) -> None:
        if overlap(part, target):
            raise ValueError(
                f"{target_name} at {byte_range(target)} overlaps {name} at {byte_range(part)}; out may be the "
                "memory of gate_up and down, expert for expert, or must be memory of its own"
            )

    for target_name, target, own in (("out[0]", l1, ("gate", "up")), ("out[1]", l2, ("down",))):
        for part in (gate, up, down):
            refuse(target_name, target.weight, f"{part.name} scales", part.scales)
            refuse(f"{target_name}.scales", target.scales, f"{part.name} scales", part.scales)
            if part.name not in own or not inside(part.values, target.weight):
                refuse(target_name, target.weight, part.name, part.values)
    refuse("out[1]", l2.weight, "out[0]", l1.weight)
