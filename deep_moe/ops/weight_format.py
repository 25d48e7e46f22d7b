"""What the weight formats have in common: how one is described, and what its encoding reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C

BLOCK = _C.kScaleGroup
GROUP = {"l1": _C.kL1GroupChannels, "l2": _C.kL2GroupChannels}  # channels that a quad of lanes holds together
QUAD = 4  # lanes that share the 8 columns of an accumulator chunk
PAIR = 2  # adjacent columns of a lane in each chunk


class Matrix(NamedTuple):
    """Gate, up or down of all experts of a rank as a checkpoint has it, checked."""

    name: str
    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class EncodingReport:
    """What an encoding could not keep. All zero: the transformed weights are the checkpoint's, bit for bit.

    Attributes:
        blocks: 128x128 blocks with a weight that changed.
        groups: groups (1 row, 32 of K) with a weight that changed.
        largest_error: |new - old| / |old| of the weight that changed most; 1.0: it became zero.
        first: the argument, expert and block of the first one, in words.
    """

    blocks: int = 0
    groups: int = 0
    largest_error: float = 0.0
    first: str = ""

    def __add__(self, other: "EncodingReport") -> "EncodingReport":
        return EncodingReport(
            self.blocks + other.blocks,
            self.groups + other.groups,
            max(self.largest_error, other.largest_error),
            self.first or other.first,
        )

    def __str__(self) -> str:
        if not self.groups:
            return "exact"
        return (
            f"{self.groups} groups of 32 weights in {self.blocks} blocks of 128x128 were rounded, because their "
            f"exponents are too far below the largest of the block; the largest relative error is "
            f"{self.largest_error:.3g}, the first is {self.first}"
        )


class Format(NamedTuple):
    """How the weights of an mma_type come in, and lie in memory afterwards.

    layout: names the bytes. dtype and block: of the transformed weight, and the shape of 256 rows and 128 of K in it.
    pair: what an argument is, in words. scale_rows: rows of a matrix that share a scale.
    check: (name, values, scales, (experts, rows, K), the last two in letters, device) -> (values, scales), or an error.
    check_exact: ValueError when the encoding would change a weight of a matrix.
    place: writes matrices, gate and up or down, to the TransformedWeights. dequantize: of them, fp32, natural layout.
    """

    layout: str
    dtype: torch.dtype
    block: tuple[int, int]
    pair: str
    scale_rows: int
    check: Callable[[str, Any, Any, Sequence[int], tuple[str, str], Any], tuple[Tensor, Tensor]]
    check_exact: Callable[[Matrix], None]
    place: Callable[[Any, Sequence[Matrix]], EncodingReport]
    dequantize: Callable[[Any], Tensor]

    @property
    def shape_words(self) -> str:
        return f"[experts, row tiles, K blocks, {self.block[0]}, {self.block[1]}]"


def scales_by_block(scales: Tensor, kind: str, k_blocks: int) -> Tensor:
    """A view [E, gate and up (l2: 1), row tiles, row blocks of a tile, K blocks] of scale records."""
    records = scales[:, :, :k_blocks]
    return records.permute(0, 3, 1, 2).unsqueeze(3) if kind == "l1" else records.permute(0, 1, 3, 2).unsqueeze(1)
