// Transformed weights: one set of bytes that every variant of every buffer reads.
//
// FP8: e4m3 [E_local][row tiles][K blocks][256][128], rows and K padded with zeros. What a pipeline stage holds of a
// tile lies together, as it will lie in shared memory: one bulk copy of 32 KB, and memory pages are read whole. (Rows
// of 128 bytes out of a row-major matrix would be 256 pages.) In the order of the 128-byte swizzle: 16-byte chunk c of
// row r is at c ^ r % 8.
//
// Rows are permuted so that what a thread holds after a tile of wgmma (of every 8 columns the two at 2 q, q its number
// in the quad) are adjacent channels, which it stores as 16 bytes without asking its neighbours:
//
// l1: groups of 64 channels in 128 rows, 8 gate rows and the 8 up rows of the same channels in turns, so that a thread
//     also holds both values of a channel.
// l2: groups of 32 channels in 32 rows.
//
// Scales: f32 [E_local][row tiles][K blocks, padded to 2][2], so that a tile's are one bulk copy. For l1 the first
// scales the gate rows and the second the up rows of those 128 channels; for l2 they are the two 128-row blocks.
//
// Biases, which only some layers have: f32, channels in their natural order, for a thread's are adjacent; zeros where
// rows are padded. l1: [E_local][row tiles][128 channels][2], gate and up; l2: [E_local][row tiles][256].
//
// MXFP4: u8 [E_local][row tiles][K blocks][kMxfp4Pieces][kMxfp4PieceBytes]; rows, padding and scales as above. A piece
// is 64 rows and 128 of K for one warpgroup, which decodes them to e4m3 in registers: the A operand of wgmma m64nNk32
// (PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk32"). A weight is e2m1 * 2^(exponent - kMxfp4ExponentBias) *
// scale, and all but the scale, a power of two, is exactly an e4m3 number.
//
// Codes, then exponents: [warp 4][v 2][lane 32][4 words], then [warp 4][g 8][group 2][v 2][half 2] bytes. Lane 4 g + q
// holds row 16 warp + g + 8 v in four words, one for every 32 of K that a wgmma takes: two for each half of the 128. A word
// has what two registers of the fragment need: elements 0 to 3 are places 4 q + 0..3 of the 32, elements 4 to 7 are 16
// further. In nibble n of a word the low three bits are the magnitude of element n, so that PRMT looks four of them up
// with half of (word & 0x77777777); its bit 3 would replicate a sign. Bit 3 of nibbles 1, 3, 5, 7 is the sign of elements
// 0, 1, 2, 3, that of nibbles 0, 2, 4, 6 the sign of elements 4, 5, 6, 7: one register has the signs word & 0x80808080,
// the other word << 4 & 0x80808080.
//
// A lane should need few exponents: each costs a table of magnitudes. So places of a wgmma are not in the order of K.
// Of 64 channels the two groups of 32 take turns, eight channels at a time: lanes with q < 2 have only weights of the
// first group, the others only weights of the second. Activations lie in the same order wherever a kernel keeps them
// (activation_byte_of).
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

constexpr u32 kWeightBlockBytes = kBlockN * kBlockK;
constexpr u32 kWeightScaleRecord = 2;  // floats for (256 weight rows, 128 of K)

constexpr u32 kMxfp4CodeBytes = kWarpgroupRows * kBlockK / 2;
constexpr u32 kMxfp4PieceBytes = kMxfp4CodeBytes + kWarpgroupRows * kBlockK / kMxfp4Group;
constexpr u32 kMxfp4Pieces = kBlockN / kWarpgroupRows;
constexpr u32 kMxfp4ExponentBias = 8;  // e2m1 * 2^-8 are the smallest of which e4m3 holds all,
constexpr u32 kMxfp4MaxExponent = 14;  // e2m1 * 2^6 the largest

// Bytes of 256 rows and 128 of K.
constexpr u32 weight_block_bytes(MmaType type) {
    return type == MmaType::Fp8xMxfp4 ? kMxfp4Pieces * kMxfp4PieceBytes : kWeightBlockBytes;
}

// What a pipeline stage holds of the weights.
constexpr u32 stage_weight_bytes(const MegaMoeConfig& c) {
    return c.decodes_in_registers() ? weight_block_bytes(c.mma_type) : kWeightBlockBytes;
}

// Weight scale records of one tile.
constexpr u32 scale_records(u32 k_blocks) { return align_up(k_blocks, 2u); }  // 16 bytes: the smallest bulk copy
// Of one expert's matrix.
constexpr u64 l1_scale_records(const MegaMoeConfig& c) {
    return u64(c.l1_weight_tiles()) * scale_records(c.l1_k_blocks());
}
constexpr u64 l2_scale_records(const MegaMoeConfig& c) {
    return u64(c.l2_weight_tiles()) * scale_records(c.l2_k_blocks());
}
// Bytes of one expert's matrix.
constexpr u64 l1_weight_bytes(const MegaMoeConfig& c) {
    return u64(c.l1_weight_tiles()) * c.l1_k_blocks() * weight_block_bytes(c.mma_type);
}
constexpr u64 l2_weight_bytes(const MegaMoeConfig& c) {
    return u64(c.l2_weight_tiles()) * c.l2_k_blocks() * weight_block_bytes(c.mma_type);
}

// Floats of one expert's biases of a matrix with so many row tiles.
constexpr u64 bias_floats(u32 weight_tiles) { return u64(weight_tiles) * kBlockN; }

// Up to so many bytes of weights should not drive other lines out of the L2 cache, most of all dirty ones, which would have
// to be written: 2 to 3 us of 60. Of more bytes the hint costs as much (bench/experiments/stream.cu).
constexpr u64 kEvictFirstBytes = u64(200) << 20;
constexpr bool loads_evict_first(const MegaMoeConfig& c, u32 experts) {
    return c.has_few_rows() && experts * (l1_weight_bytes(c) + l2_weight_bytes(c)) <= kEvictFirstBytes;
}

constexpr u32 kL1GroupChannels = 64;  // a thread of a quad holds 16 of them: 16 bytes of e4m3
constexpr u32 kL2GroupChannels = 32;  // 8 of them: 16 bytes of bf16

// Row of the l1 matrix that holds the gate (or up) weights of a channel.
constexpr u32 l1_row_of(u32 channel, bool is_up) {
    const u32 group = channel / kL1GroupChannels, quad_lane = channel % kL1GroupChannels / 16, chunk = channel % 16 / 2;
    return group * 2 * kL1GroupChannels + chunk * 16 + (is_up ? 8 : 0) + quad_lane * 2 + channel % 2;
}

// Row of the l2 matrix that holds the weights of a channel.
constexpr u32 l2_row_of(u32 channel) {
    const u32 group = channel / kL2GroupChannels, quad_lane = channel % kL2GroupChannels / 8, chunk = channel % 8 / 2;
    return group * kL2GroupChannels + chunk * 8 + quad_lane * 2 + channel % 2;
}

// The inverse: channel of a gate row (the up row of the same channel is 8 further), and of an l2 row.
constexpr u32 l1_channel_of(u32 gate_row) {
    return gate_row / (2 * kL1GroupChannels) * kL1GroupChannels + gate_row % 8 / 2 * 16 +
           gate_row % (2 * kL1GroupChannels) / 16 * 2 + gate_row % 2;
}
constexpr u32 l2_channel_of(u32 row) {
    return row / kL2GroupChannels * kL2GroupChannels + row % 8 / 2 * 8 + row % kL2GroupChannels / 8 * 2 + row % 2;
}

// Where element (row, k) of an expert's FP8 matrix lies in its bytes.
constexpr u64 weight_byte_of(u32 k_blocks, u32 row, u32 k) {
    const u64 block = u64(row / kBlockN) * k_blocks + k / kBlockK;
    const u32 chunk = k % kBlockK / 16 ^ row % 8;
    return block * kWeightBlockBytes + row % kBlockN * kBlockK + chunk * 16 + k % 16;
}

// Where the piece of an expert's MXFP4 matrix that holds (row, k) begins.
constexpr u64 mxfp4_piece_of(u32 k_blocks, u32 row, u32 k) {
    const u64 block = u64(row / kBlockN) * k_blocks + k / kBlockK;
    return (block * kMxfp4Pieces + row % kBlockN / kWarpgroupRows) * kMxfp4PieceBytes;
}

// The place of channel k among the 128 of its K block, in MXFP4 layers.
constexpr u32 mxfp4_place_of(u32 k) {
    const u32 half = k % kBlockK / 64, group = k % 64 / kMxfp4Group, eight = k % kMxfp4Group / 8;
    return half * 64 + eight * 16 + group * 8 + k % 8;
}
// Where channel k of a staged or pooled row lies, in bytes.
constexpr u32 activation_byte_of(MmaType type, u32 k) {
    return type == MmaType::Fp8xMxfp4 ? k / kBlockK * kBlockK + mxfp4_place_of(k) : k;
}

// Where the word lies that holds (row, k), and which of its eight elements that is.
constexpr u64 mxfp4_word_of(u32 k_blocks, u32 row, u32 k) {
    const u32 warp = row % kWarpgroupRows / 16, v = row % 16 / 8, g = row % 8;
    const u32 place = mxfp4_place_of(k), q = place % 16 / 4, wgmma = place / 32;
    return mxfp4_piece_of(k_blocks, row, k) + ((warp * 2 + v) * 32 + g * 4 + q) * 16 + wgmma * 4;
}
constexpr u32 mxfp4_element_of(u32 k) { return mxfp4_place_of(k) % 32 / 16 * 4 + k % 4; }

// Bit of the word that is the sign of an element; its magnitude are the three bits from 4 * element on.
constexpr u32 mxfp4_sign_bit_of(u32 element) { return element < 4 ? 8 * element + 7 : 8 * (element - 4) + 3; }

// Where the exponent of (row, k) lies.
constexpr u64 mxfp4_exponent_byte_of(u32 k_blocks, u32 row, u32 k) {
    const u32 warp = row % kWarpgroupRows / 16, v = row % 16 / 8, g = row % 8;
    const u32 half = k % kBlockK / 64, group = k % 64 / kMxfp4Group;
    return mxfp4_piece_of(k_blocks, row, k) + kMxfp4CodeBytes + ((warp * 8 + g) * 2 + group) * 4 + v * 2 + half;
}

}  // namespace deep_moe
