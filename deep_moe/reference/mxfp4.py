"""MXFP4 (OCP Microscaling 1.0): e2m1 codes with one power of two per 32 columns; and what the kernels make of it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from deep_moe.reference.quant import GROUP

MX_GROUP = 32
GROUP_BYTES = MX_GROUP // 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX_EXPONENT = 2  # of 4 and 6
E8M0_BIAS, E8M0_NAN = 127, 255
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The exponents r for which e4m3 holds every e2m1 * 2^r.
LOWEST, HIGHEST = -8, 6


def _powers(exponents: Tensor) -> Tensor:
    """float64 2^e. NOTES: `torch.ldexp` takes the power in float32, and `exp2` need not be exact."""
    return (exponents.clamp(-1022, 1023).long() + 1023 << 52).view(torch.float64)


def _round_e2m1(magnitudes: Tensor) -> Tensor:
    """float64 -> code 0 to 7 of the nearest magnitude, ties to the even code; 7 from 6 on."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=magnitudes.device)
    middles = (table[1:] + table[:-1]) / 2
    below, above = (torch.bucketize(magnitudes, middles, right=right) for right in (False, True))
    return torch.where(below % 2 == 0, below, above)  # they differ at a tie


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights as the standard says: exponent floor(log2(amax)) - 2, round to nearest even, saturate at 6.

    Args:
        w: float [..., N, K], finite, K a multiple of 32.

    Returns:
        (u8 [..., N, K/2], two codes a byte, the even column in the low bits; u8 [..., N, K/32], e8m0 codes).
    """
    groups = w.double().unflatten(-1, (-1, MX_GROUP))
    _, exponents = torch.frexp(groups.abs().amax(-1))  # amax < 2^exponent
    exponents = (exponents - 1 - E2M1_MAX_EXPONENT).clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = groups * _powers(-exponents)[..., None]
    codes = (_round_e2m1(scaled.abs()) | scaled.signbit() << 3).flatten(-2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + E8M0_BIAS).to(torch.uint8)


def _check(packed: Tensor, scales: Tensor) -> None:
    """ValueError unless dtypes and shapes are what `dequantize_mxfp4` says."""
    for name, tensor, dtypes in (("packed", packed, (torch.uint8, torch.int8)), ("scales", scales, SCALE_DTYPES)):
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    *outer, last = packed.shape
    if packed.dim() in (2, 3) and last % GROUP_BYTES == 0:
        outer.append(last // GROUP_BYTES)
    elif packed.dim() != 4 or last != GROUP_BYTES:
        raise ValueError(
            f"packed has shape {list(packed.shape)}; it must be [N, K/2], [E, N, K/2] or [E, N, K/{MX_GROUP}, "
            f"{GROUP_BYTES}], with K a multiple of {MX_GROUP}"
        )
    if list(scales.shape) != outer:
        raise ValueError(f"scales has shape {list(scales.shape)}; it must be one per {MX_GROUP} of K = {outer}")


def _codes(packed: Tensor) -> Tensor:
    """uint8 or int8 [..., N, K/2], or [E, N, K/32, 16] -> int64 [..., N, K] of 0 to 15."""
    if packed.dim() == 4:
        packed = packed.flatten(2)
    values = packed.view(torch.uint8).long()
    return torch.stack([values & 15, values >> 4], -1).flatten(-2)


def _exponents(scales: Tensor) -> Tensor:
    """Scales as codes (uint8, e8m0) or as powers of two (any float) -> int64 exponents; 128 for NaN."""
    if _are_codes(scales):
        return scales.view(torch.uint8).long() - E8M0_BIAS
    fractions, exponents = torch.frexp(scales.double())  # of a power of two: 0.5 and its exponent + 1
    exponents = exponents.long() - 1
    wrong = (fractions != 0.5) | (exponents.abs() > E8M0_BIAS)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"scales at {list(where)} is {float(scales[where])!r}; it must be a power of two from 2^-{E8M0_BIAS} to "
            f"2^{E8M0_BIAS}: MXFP4 has no other scales"
        )
    return exponents


def _are_codes(scales: Tensor) -> bool:
    return scales.dtype in (torch.uint8, torch.float8_e8m0fnu)


def _values(codes: Tensor) -> Tensor:
    table = torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)], dtype=torch.float64, device=codes.device)
    return table[codes]


def dequantize_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that a checkpoint means.

    Args:
        packed: u8 or i8, two codes a byte: [N, K/2], [E, N, K/2] or [E, N, K/32, 16], K a multiple of 32.
        scales: [N, K/32] or, with E, [E, N, K/32]: u8 or float8_e8m0fnu codes; or powers of two from 2^-127 to 2^127
            in fp32, bf16, fp16 or fp64.
        dtype: of the result. float64 holds all of them; in float32, 2 and more times 2^127 are infinite.

    Returns:
        `dtype` [N, K] or [E, N, K]; NaN where the scale is the code 255.

    Raises:
        ValueError: a dtype or a shape is none of these; a float scale is no such power of two.
    """
    _check(packed, scales)
    powers = _powers(_exponents(scales))
    if _are_codes(scales):
        powers = powers.masked_fill(scales.view(torch.uint8) == E8M0_NAN, torch.nan)
    return (_values(_codes(packed)) * powers.repeat_interleave(MX_GROUP, -1)).to(dtype)


def encode_mxfp4(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 numbers that the kernels multiply instead, with a power of two per 128x128 block.

    Of every block (gate and up apart) the largest exponent of a group with a nonzero weight becomes 2^6 times the
    block's scale, or less where the scale would be below 2^-126. Groups more than 14 binades lower are rounded to the
    nearest e2m1 * 2^-8; everything else is exact. The scale of a block of zeros is 0.

    Args:
        packed, scales: as for `dequantize_mxfp4`, without NaN.

    Returns:
        (e4m3 [..., N, K], f32 [..., ceil(N/128), ceil(K/128)]), as `quantize_blocks`; with E if `packed` has it.

    Raises:
        ValueError: as `dequantize_mxfp4`; a scale is the code 255.
    """
    _check(packed, scales)
    codes, exponents = _codes(packed), _exponents(scales)
    wrong = exponents == E8M0_NAN - E8M0_BIAS
    if wrong.any():
        raise ValueError(f"scales at {wrong.nonzero()[0].tolist()} is the code {E8M0_NAN}, a NaN; codes are 0 to 254")
    n, k = codes.shape[-2:]
    rows, columns = -n % GROUP, -k % GROUP
    groups = pad(codes, (0, columns, 0, rows)).unflatten(-1, (-1, MX_GROUP))
    exponents = pad(exponents, (0, columns // MX_GROUP, 0, rows))
    used = (groups & 7 != 0).any(-1)

    def per_block(of_groups: Tensor) -> Tensor:  # [..., row blocks, 128, K blocks, groups]
        return of_groups.unflatten(-1, (-1, GROUP // MX_GROUP)).unflatten(-3, (-1, GROUP))

    nothing = -(1 << 16)
    largest = per_block(exponents.masked_fill(~used, nothing)).amax((-3, -1), keepdim=True)
    base = (largest - HIGHEST).clamp_min(1 - E8M0_BIAS)
    relative = (per_block(exponents) - base).flatten(-4, -3).flatten(-2)[..., None]
    lost = (LOWEST - relative).clamp_min(0)  # binades
    values = _values(groups)
    rounded = _values(_round_e2m1(values.abs() * _powers(-lost))).copysign(values)
    values = (rounded * _powers(relative.clamp(LOWEST, HIGHEST))).flatten(-2)[..., :n, :k]
    scales = _powers(base).masked_fill(largest == nothing, 0)
    return values.to(torch.float8_e4m3fn), scales[..., 0, :, 0].float()
