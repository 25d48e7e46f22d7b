"""MXFP4 weights with chosen exponents, and what a kernel's math warps do with a transformed piece, in numpy."""

import numpy as np
import torch

import deep_moe
from deep_moe import _C, testing

LUT_LOW, LUT_HIGH = 0x3C383000, 0x4C484440  # e4m3 of the e2m1 magnitudes, four a word
BYTES_LOW, BYTES_HIGH = 0x08080800, 0x08080808  # one binade of each that is not zero
# Below 2^-5 some are subnormal and a binade is no longer 8 codes apart.
SUBNORMAL_LUTS = {
    -6: (0x0C080400, 0x1C181410),
    -7: (0x06040200, 0x14100C08),
    -8: (0x03020100, 0x0C080604),
}


def problem_of(hidden, intermediate, experts=2, **fields):
    sizes = dict(num_experts=experts, num_topk=1, hidden=hidden, intermediate=intermediate, max_tokens_per_rank=8)
    return deep_moe.Problem(**sizes, mma_type="fp8xmxfp4", **fields)


def random_mxfp4(problem, exponents, seed=0):
    """testing.Weights of any codes, with exponent codes from range(*exponents)."""
    generator = testing.generator_of(seed)

    def matrix(n, k):
        codes = torch.randint(0, 256, (problem.num_experts, n, k // 2), generator=generator)
        scales = torch.randint(*exponents, (problem.num_experts, n, k // 32), generator=generator)
        return codes.to(torch.uint8), scales.to(torch.uint8)

    h, i = problem.hidden, problem.intermediate
    return testing.Weights(matrix(i, h), matrix(i, h), matrix(h, i))


def codes_of(packed):
    """u8 [..., K/2] -> [..., K] of 0 to 15."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _prmt(low, high, selector):
    """PRMT.b32: each of the low four nibbles picks a byte of (high, low); bit 3 would replicate its sign instead."""
    pool = np.stack([table >> np.uint32(8 * i) & np.uint32(255) for table in (low, high) for i in range(4)], -1)
    result = np.zeros_like(selector)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        picked = np.take_along_axis(pool, (nibble & 7)[..., None].astype(np.int64), -1)[..., 0]
        picked = np.where(nibble & 8, np.where(picked & 128, np.uint32(255), np.uint32(0)), picked)
        result |= picked << np.uint32(8 * byte)
    return result


def lookup_words(exponents):
    """(low, high) words for relative exponents r."""
    low = np.uint32(LUT_LOW) + exponents.astype(np.uint32) * np.uint32(BYTES_LOW)
    high = np.uint32(LUT_HIGH) + exponents.astype(np.uint32) * np.uint32(BYTES_HIGH)
    for r, (table_low, table_high) in SUBNORMAL_LUTS.items():
        low, high = np.where(exponents == r, table_low, low), np.where(exponents == r, table_high, high)
    return low.astype(np.uint32), high.astype(np.uint32)


def decode_piece(piece):
    """u8 [4352] -> e4m3 bytes [64 rows, 128 of K], by the four registers of each lane's wgmma fragment.

    Register i of lane 4 g + q, for the 32 places of one wgmma: row 16 warp + g + 8 (i % 2), places 4 q + 16 (i / 2) +
    0..3. Lanes with q < 2 have places of the first group of a half K block, the others of the second.
    """
    codes, exponents = piece[: _C.kMxfp4CodeBytes], piece[_C.kMxfp4CodeBytes :]
    words = codes.view("<u4").reshape(4, 2, 8, 4, 4)  # warp, v, g, q, wgmma
    r = exponents.reshape(4, 8, 2, 2, 2).transpose(0, 3, 1, 2, 4)  # warp, v, g, group, half
    r = r.repeat(2, 3).repeat(2, 4).astype(np.int64) - _C.kMxfp4ExponentBias  # as the words
    low, high = lookup_words(r)
    magnitudes, signs = words & np.uint32(0x77777777), np.uint32(0x80808080)
    registers = (
        _prmt(low, high, magnitudes & np.uint32(0xFFFF)) | words & signs,
        _prmt(low, high, magnitudes >> np.uint32(16)) | words << np.uint32(4) & signs,
    )
    places = np.zeros((4, 2, 8, 4, 2, 4, 4), np.uint8)  # warp, v, g, wgmma, which 16 of its 32, q, byte
    for sixteen, register in enumerate(registers):
        four_bytes = np.ascontiguousarray(register)[..., None].view(np.uint8)  # warp, v, g, q, wgmma, byte
        places[:, :, :, :, sixteen] = four_bytes.transpose(0, 1, 2, 4, 3, 5)
    by_place = places.reshape(64, 128)
    return by_place[:, [_C.activation_byte_of(_C.MmaType.Fp8xMxfp4, k) for k in range(128)]]


def decode(part):
    """float64 [experts, rows in memory, padded K] of the transformed rows of a part: e4m3 times block scale."""
    experts, tiles, k_blocks = part.weight.shape[:3]
    e4m3 = np.stack([decode_piece(piece) for piece in part.weight.flatten(0, 3).numpy()])
    e4m3 = e4m3.reshape(experts, tiles, k_blocks, 256, 128).transpose(0, 1, 3, 2, 4)
    values = torch.from_numpy(np.ascontiguousarray(e4m3)).view(torch.float8_e4m3fn).double()
    scales = part.scales[:, :, :k_blocks].double()
    rows = torch.arange(256)
    second = rows % 16 >= 8 if part.kind == "l1" else rows >= 128
    return (values * scales[:, :, :, second.long()].permute(0, 1, 3, 2)[..., None]).flatten(3).flatten(1, 2)


def decoded_parts(problem, part):
    """float64 gate and up, or down, as `decode` has them, in the order of channels."""
    rows = decode(part)
    if part.kind == "l2":
        return [rows[:, [_C.l2_row_of(c) for c in range(problem.hidden)], : problem.intermediate]]
    channels = range(problem.intermediate)
    return [rows[:, [_C.l1_row_of(c, up) for c in channels], : problem.hidden] for up in (False, True)]
