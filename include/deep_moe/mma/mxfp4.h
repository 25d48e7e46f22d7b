// From the codes and exponents of MXFP4 weights (layout/weights.h) to e4m3, in registers: A of wgmma m64nNk32.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/layout/weights.h"

namespace deep_moe {

// Byte i is the e4m3 code of the magnitude with e2m1 code i.
struct Mxfp4Magnitudes {
    u32 low, high;
};

constexpr u32 kMxfp4NormalExponent = 3;  // from here on none of them is an e4m3 subnormal

// Of exponents from kMxfp4NormalExponent on. A binade more adds 8 to a code, but not to that of zero; the constants are
// the codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 for an exponent of zero, had e4m3 normal numbers that small.
DM_HOST_DEVICE constexpr Mxfp4Magnitudes mxfp4_normal_magnitudes(u32 exponent) {
    constexpr u32 kLow = (0u << 0) - (16u << 8) - (8u << 16) - (4u << 24);
    constexpr u32 kHigh = (0u << 0) + (4u << 8) + (8u << 16) + (12u << 24);
    return {exponent * 0x08080800u + kLow, exponent * 0x08080808u + kHigh};
}

DM_HOST_DEVICE constexpr Mxfp4Magnitudes mxfp4_magnitudes(u32 exponent) {
    if (exponent == 0) return {0x03020100, 0x0c080604};
    if (exponent == 1) return {0x06040200, 0x14100c08};
    if (exponent == 2) return {0x0c080400, 0x1c181410};
    return mxfp4_normal_magnitudes(exponent);
}

// Whether all four exponents of a word are normal. A byte is at most kMxfp4MaxExponent: no carry.
DM_HOST_DEVICE constexpr bool mxfp4_all_normal(u32 exponents) {
    constexpr u32 kToBit7 = 0x01010101 * (0x80 - kMxfp4NormalExponent);
    return (~(exponents + kToBit7) & 0x80808080) == 0;
}

// A thread's part of a piece (layout/weights.h).
struct Mxfp4Codes {
    Vec16 row[2];   // a word for every wgmma
    u32 exponents;  // [row][half of the K block]
};

// Where they lie in it, in bytes: the words of the first row (those of the second are kWarpSize vectors further), and the
// exponents.
DM_HOST_DEVICE constexpr u32 mxfp4_words_of(u32 warp, u32 lane) {
    return (warp * 2 * kWarpSize + lane) * u32(sizeof(Vec16));
}
DM_HOST_DEVICE constexpr u32 mxfp4_exponents_of(u32 warp, u32 lane) {
    return kMxfp4CodeBytes + ((warp * 8 + lane / 4) * 2 + lane % 4 / 2) * 4;
}

// Of 16 rows of a piece in shared memory, those with this number.
DM_DEVICE u32 load_mxfp4_exponents(const u8* piece, u32 warp, u32 lane) {
    return hw::load_shared(reinterpret_cast<const u32*>(piece + mxfp4_exponents_of(warp, lane)));
}
DM_DEVICE Mxfp4Codes load_mxfp4(const u8* piece, u32 warp, u32 lane) {
    const Vec16* words = reinterpret_cast<const Vec16*>(piece + mxfp4_words_of(warp, lane));
    return {{hw::load_shared(words), hw::load_shared(words + kWarpSize)}, load_mxfp4_exponents(piece, warp, lane)};
}

// a[i]: the fragment of the block's i-th wgmma (hw::wgmma_m64k32_e4m3). The exponents of all lanes are normal, or some not.
DM_DEVICE void decode_mxfp4(const Mxfp4Codes& codes, bool all_normal, u32 (&a)[4][4]) {
    Mxfp4Magnitudes of[4];  // as the exponents
    DM_UNROLL
    for (u32 i = 0; i < 4; ++i) of[i] = mxfp4_normal_magnitudes(hw::byte_permute(codes.exponents, 0, 0x4440 + i));
    if (!all_normal)
        DM_UNROLL
        for (u32 i = 0; i < 4; ++i) of[i] = mxfp4_magnitudes(hw::byte_permute(codes.exponents, 0, 0x4440 + i));
    DM_UNROLL
    for (u32 i = 0; i < 4; ++i)
        DM_UNROLL
        for (u32 v = 0; v < 2; ++v) {
            const auto [low, high] = of[v * 2 + i / 2];
            const u32 word = codes.row[v].w[i], selector = word & 0x77777777;
            a[i][v] = hw::byte_permute(low, high, selector) | (word & 0x80808080);
            a[i][2 + v] = hw::byte_permute(low, high, selector >> 16) | (word << 4 & 0x80808080);
        }
}
DM_DEVICE void decode_mxfp4(const Mxfp4Codes& codes, u32 (&a)[4][4]) {
    decode_mxfp4(codes, hw::all_lanes(mxfp4_all_normal(codes.exponents)), a);
}

// The fragments of 16 rows of a K block, to where FP8 weights would lie (layout/weights.h); `rows` is where the first row
// begins, decoded_byte_of(lane) further. Free of bank conflicts.
DM_HOST_DEVICE constexpr u32 decoded_byte_of(u32 lane) { return lane / 4 * kBlockK + lane % 4 * 4; }
DM_DEVICE void store_decoded(u8* rows, u32 lane, const u32 (&a)[4][4]) {
    DM_UNROLL
    for (u32 i = 0; i < 4; ++i)
        DM_UNROLL
        for (u32 r = 0; r < 4; ++r) {
            const u32 column = (i * 32 + r / 2 * 16) ^ lane / 4 * 16;
            hw::store_shared(reinterpret_cast<u32*>(rows + r % 2 * 8 * kBlockK + column), a[i][r]);
        }
}

}  // namespace deep_moe
