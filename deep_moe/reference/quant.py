"""Block scaling of e4m3: per token and 128 channels for activations, per 128x128 block for weights.

NOTES: torch turns `448.0 / tensor` into a reciprocal and a multiply, and on CUDA `tensor / 448.0` into a multiply by
1/448. Both round twice where the kernel rounds once, so every division here is tensor by tensor.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10


def _to_e4m3(values: Tensor) -> Tensor:
    """Round to nearest even, saturate at 448, keep NaN (`cvt.rn.satfinite.e4m3x2.f32`)."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scale_and_inverse(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(sf, 1/sf) of groups with the largest magnitude `amax` (f32): amax_c / 448 and 448 / amax_c."""
    amax = amax.clamp_min(AMAX_FLOOR)
    limit = torch.full_like(amax, E4M3_MAX)
    return amax / limit, limit / amax


def _amax(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude, ignoring NaN as `fmaxf` does; Inf counts."""
    return values.masked_fill(values.isnan(), 0).abs().amax(dims)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations with one continuous scale per row and 128 columns.

    Args:
        x: float [M, N], any N; the last group may be narrower than 128.

    Returns:
        (e4m3 [M, N], f32 [M, ceil(N/128)]): q = e4m3(x * (448 / a)), sf = a / 448 with a = max(amax, 1e-10).
    """
    rows, columns = x.shape
    values = x.float()
    padded = pad(values, (0, -columns % GROUP))
    groups = padded.view(rows, padded.shape[1] // GROUP, GROUP)
    sf, inverse = _scale_and_inverse(_amax(groups, (2,)))
    q = _to_e4m3(groups * inverse[..., None]).view(padded.shape)[:, :columns]
    return q.contiguous(), sf


def dequantize_rows(q: Tensor, sf: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantize_rows`: e4m3 [M, N] and f32 [M, ceil(N/128)] -> `dtype` [M, N]."""
    return q.to(dtype) * sf.to(dtype).repeat_interleave(GROUP, -1)[..., : q.shape[-1]]


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights with one scale per 128x128 block.

    Args:
        w: float [..., N, K]; edge blocks may be smaller.

    Returns:
        (e4m3 [..., N, K], f32 [..., ceil(N/128), ceil(K/128)]), the layout of DeepSeek's FP8 checkpoints.
    """
    n, k = w.shape[-2:]
    padded = pad(w.float(), (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.view(*w.shape[:-2], padded.shape[-2] // GROUP, GROUP, padded.shape[-1] // GROUP, GROUP)
    sf, inverse = _scale_and_inverse(_amax(blocks, (-3, -1)))
    q = _to_e4m3(blocks * inverse[..., :, None, :, None]).view(padded.shape)[..., :n, :k]
    return q.contiguous(), sf


def dequantize_blocks(q: Tensor, sf: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantize_blocks`: e4m3 [..., N, K] and f32 [..., ceil(N/128), ceil(K/128)] -> `dtype` [..., N, K]."""
    n, k = q.shape[-2:]
    scales = sf.to(dtype).repeat_interleave(GROUP, -2).repeat_interleave(GROUP, -1)
    return q.to(dtype) * scales[..., :n, :k]
