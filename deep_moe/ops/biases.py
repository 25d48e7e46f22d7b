"""Expert biases, from a checkpoint's to the floats that the kernels read (include/deep_moe/layout/weights.h): fp32,
channels in their natural order, gate and up of a channel side by side, zeros where the rows of the weights are padded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..config import Problem
from .checks import check_matrix

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Biases(NamedTuple):
    """Of this rank's experts, checked: fp32 copies, so that nothing that is written later can change them."""

    gate_up: Tensor  # [E_local, I, 2]
    down: Tensor  # [E_local, H]


def checked_biases(problem: Problem, gate_up: Any, down: Any, experts: int, device: torch.device) -> Biases | None:
    """The arguments `gate_up_bias` and `down_bias` of transform_weights; None where the problem has no biases."""
    for name, value in (("gate_up_bias", gate_up), ("down_bias", down)):
        if problem.bias and value is None:
            raise ValueError(f"{name} is None, but the problem has bias=True; pass the biases of this rank's experts")
        if not problem.bias and value is not None:
            raise ValueError(
                f"{name} is a {type(value).__name__}, but the problem has bias=False; leave it out, or create the "
                "Problem with bias=True"
            )
    if not problem.bias:
        return None
    h, i = problem.hidden, problem.intermediate
    if isinstance(gate_up, Sequence):
        if len(gate_up) != 2:
            raise TypeError(f"gate_up_bias holds {len(gate_up)} items; it must be one tensor, or a pair (gate, up)")
        for name, half in zip(("gate", "up"), gate_up, strict=True):
            check_matrix(f"gate_up_bias ({name})", half, (experts, i), "[experts, I]", device, *DTYPES)
        gate, up = gate_up
    else:
        check_matrix("gate_up_bias", gate_up, (experts, 2 * i), "[experts, 2I]", device, *DTYPES)
        gate, up = gate_up[:, :i], gate_up[:, i:]
    check_matrix("down_bias", down, (experts, h), "[experts, H]", device, *DTYPES)
    return Biases(torch.stack([gate.float(), up.float()], dim=2), down.to(torch.float32, copy=True))


def bias_shape(kind: str, experts: int, row_tiles: int) -> tuple[int, ...]:
    """Of what the kernels read of "l1" or "l2"."""
    tile = (_C.kBlockN // 2, 2) if kind == "l1" else (_C.kBlockN,)
    return experts, row_tiles, *tile


def place_bias(target: Tensor, source: Tensor) -> None:
    """Writes Biases.gate_up into the memory of l1, or Biases.down into that of l2; its padding is zeros already."""
    target.flatten(1, 2)[:, : source.shape[1]].copy_(source)


def natural_bias(kind: str, bias: Tensor, channels: int) -> Tensor:
    """The way back: fp32 [E_local, 2I], gate first (l1), or [E_local, H] (l2). channels: I or H."""
    natural = bias.flatten(1, 2)[:, :channels]
    return torch.cat(natural.unbind(2), dim=1) if kind == "l1" else natural.clone()
