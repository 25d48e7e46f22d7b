// Transformed weights: one set of bytes that every variant of every buffer reads.
//
// e4m3 [E_local][row tiles][K blocks][256][128], rows and K padded with zeros. What a pipeline stage holds of a tile
// lies together, as it will lie in shared memory: one bulk copy of 32 KB, and memory pages are read whole. (Rows of 128
// bytes out of a row-major matrix would be 256 pages.) In the order of the 128-byte swizzle: 16-byte chunk c of row r is
// at c ^ r % 8.
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
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

constexpr u32 kWeightBlockBytes = kBlockN * kBlockK;
constexpr u32 kWeightScaleRecord = 2;  // floats for (256 weight rows, 128 of K)

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
    return u64(c.l1_weight_tiles()) * c.l1_k_blocks() * kWeightBlockBytes;
}
constexpr u64 l2_weight_bytes(const MegaMoeConfig& c) {
    return u64(c.l2_weight_tiles()) * c.l2_k_blocks() * kWeightBlockBytes;
}

// Up to so many bytes of weights should not drive other lines out of the L2 cache, most of all dirty ones, which would have
// to be written: 2 to 3 us of 60. Of more bytes the hint costs as much (bench/experiments/stream.cu).
constexpr u64 kEvictFirstBytes = u64(200) << 20;
constexpr bool loads_evict_first(const MegaMoeConfig& c, u32 experts) {
    return c.swaps_operands() && experts * (l1_weight_bytes(c) + l2_weight_bytes(c)) <= kEvictFirstBytes;
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

// Where element (row, k) of an expert's matrix lies in its bytes.
constexpr u64 weight_byte_of(u32 k_blocks, u32 row, u32 k) {
    const u64 block = u64(row / kBlockN) * k_blocks + k / kBlockK;
    const u32 chunk = k % kBlockK / 16 ^ row % 8;
    return block * kWeightBlockBytes + row % kBlockN * kBlockK + chunk * 16 + k % 16;
}

}  // namespace deep_moe
