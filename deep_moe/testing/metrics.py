"""How far a result is from the truth."""

from typing import NamedTuple

import torch
from torch import Tensor


class Error(NamedTuple):
    """Errors of y against a reference, both [T, H]."""

    frobenius: float  # |y - ref| / |ref| over everything; inf if a NaN or Inf stands in one of them only
    worst_row: float  # the largest such ratio of a single token
    median_ratio: float  # median of y / ref: 1 = unbiased


def error_of(y: Tensor, ref: Tensor) -> Error:
    """Relative errors in float64; tokens whose reference is not finite, or 0, must match exactly."""
    y, ref = y.double(), ref.double()
    if y.shape != ref.shape:
        raise ValueError(f"y is {tuple(y.shape)}, the reference {tuple(ref.shape)}")
    plain = ref.isfinite().all(1) & (ref != 0).any(1)
    odd_y, odd_ref = y[~plain], ref[~plain]
    odd_equal = torch.equal(odd_y.nan_to_num(1.5), odd_ref.nan_to_num(1.5))
    y, ref = y[plain], ref[plain]
    if not odd_equal or not y.isfinite().all():
        return Error(float("inf"), float("inf"), float("nan"))
    if ref.numel() == 0:
        return Error(0.0, 0.0, 1.0)
    rows = (y - ref).norm(dim=1) / ref.norm(dim=1)
    ratio = (y / ref)[ref != 0].median()
    return Error(float((y - ref).norm() / ref.norm()), float(rows.max()), float(ratio))


DEFAULT_BAR = 5e-3  # of a large zero-mean batch against the reference with the same requantisation
BORDER_SHARE = (
    3e-3  # of requantised values lie so close to the border of two e4m3 codes that a kernel may pick the other
)


def error_bar(problem, num_tokens: int, large_batch: float = DEFAULT_BAR) -> float:
    """Largest relative Frobenius error of `num_tokens` correct tokens that have an expert; `large_batch` of very many.

    Nearly all of it comes from requantised values that fall on the other side of a rounding border, each off by up to
    7 %. A large batch averages over many; a single token, whose slots may all go to one expert, may meet an important
    one.
    """
    borders = BORDER_SHARE * max(num_tokens, 1) * problem.intermediate
    return large_batch * (1 + 6 / borders**0.5)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, NaN included."""
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
