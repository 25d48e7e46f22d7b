"""Checks of tensor arguments. Every message names the argument, what it is, what is allowed and what to do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load or store: rows that kernels read in vectors start at multiples of it


def check_tensor(name: str, value: Any) -> None:
    """TypeError unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        types = " or ".join(map(str, allowed))
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {types}: convert it first")


def check_mma_type(name: str, tensor: Tensor, others: Sequence[torch.dtype], mma_type: str, other: str) -> None:
    """Weights of a dtype that another mma_type has are not to be converted."""
    if isinstance(tensor, Tensor) and tensor.dtype in others:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which are weights of a problem with mma_type {other!r}; this one has "
            f"{mma_type!r}"
        )


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}: move it with .to({str(device)!r})")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], what: str) -> None:
    """what: the shape in words, such as "[tokens, hidden]"."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {what} = {list(shape)}")


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor with elements, and the one behind its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory (by their outer bounds)."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a_begin, a_end), (b_begin, b_end) = byte_range(a), byte_range(b)
    return a_begin < b_end and b_begin < a_end


def check_outside(name: str, address: int, buffer: Any) -> None:
    """ValueError when memory that a launch reads or writes beside the symmetric buffer lies in it."""
    begin, end = buffer.address_range
    if begin <= address < end:
        raise ValueError(f"{name} lies in the symmetric buffer; pass a tensor with memory of its own")


def row_stride(name: str, tensor: Tensor, vectorised: bool) -> int:
    """Bytes between the rows of a matrix whose rows are contiguous.

    vectorised: rows must start at multiples of 16 bytes.
    """
    rows, columns = tensor.shape
    outer, inner = tensor.stride()
    size = tensor.element_size()
    if inner != 1 and columns > 1 and rows > 0:
        raise ValueError(f"{name} has strides {(outer, inner)}; each row must be contiguous: call .contiguous() on it")
    if rows > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"{name} has no memory (was its storage resized or is it a fake tensor?)")
    if outer < columns and rows > 1:
        raise ValueError(f"{name} has rows that overlap (strides {(outer, inner)}): call .contiguous() on it")
    stride = (outer if rows > 1 else columns) * size
    if vectorised and rows > 0 and (tensor.data_ptr() % VECTOR_BYTES or (rows > 1 and stride % VECTOR_BYTES)):
        raise ValueError(
            f"{name} starts at address {tensor.data_ptr():#x} with {stride} bytes between rows; both must be multiples "
            f"of {VECTOR_BYTES} bytes: copy it into a tensor of its own"
        )
    return stride


def check_matrix(
    name: str, value: Any, shape: Sequence[int], what: str, device: torch.device, *dtypes: torch.dtype
) -> None:
    """A tensor with this shape and device and one of these dtypes."""
    if type(value) is Tensor and value.dtype in dtypes and value.shape == shape and value.device == device:
        return
    check_tensor(name, value)
    check_dtype(name, value, *dtypes)
    check_device(name, value, device)
    check_shape(name, value, shape, what)
