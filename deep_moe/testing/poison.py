"""Fill what a call must not read with values that show: NaN, and 0x7f in every byte (NaN as e4m3, 3.4e38 as float)."""

import torch
from torch import Tensor

POISON_BYTE = 0x7F

# Fields of the symmetric buffer that carry nothing from one launch to the next.
SCRATCH_FIELDS = (
    "recv_counts",
    "source_lists",
    "l1_pool",
    "l1_pool_sf",
    "row_meta",
    "l2_pool",
    "l2_pool_sf",
    "combine_slots",
    "decoded_weights",
)


def poison(tensor: Tensor) -> Tensor:
    """NaN in a float tensor, 0x7f in every byte of any other. In place; returns the tensor."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    tensor.view(torch.uint8).fill_(POISON_BYTE)
    return tensor


def is_poison(tensor: Tensor) -> Tensor:
    """Boolean per element: still what `poison` wrote."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.isnan()
    return (tensor.contiguous().view(torch.uint8).view(*tensor.shape, -1) == POISON_BYTE).all(-1)


def poison_buffer(buffer) -> None:
    """Poison a `SymmBuffer` of one rank while no rank has a launch in flight.

    Staged inputs become NaN rows that carry the real expert id 0, as padding rows of a CUDA-graph batch do: `stage`
    overwrites the rows that count, and the kernel must not look at the others.
    """
    poison(buffer.x)
    poison(buffer.x_sf)
    poison(buffer.topk_weights)
    buffer.topk_idx.zero_()
    for name in SCRATCH_FIELDS:
        poison(buffer.field(name))
