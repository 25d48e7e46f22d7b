// Transformed weights: one set of bytes that every variant of every buffer reads.
//
// Rows are permuted so that what a thread holds after a tile of wgmma (of every 8 columns the two at 2 q, q its number in
// the quad) are adjacent channels, which it stores as 16 bytes without asking its neighbours:
//
// l1 [E_local][2 * padded I][H] e4m3: groups of 64 channels in 128 rows, 8 gate rows and the 8 up rows of the same channels
//     in turns, so that a thread also holds both values of a channel. I is padded to 64 with rows of zeros.
// l2 [E_local][H][I] e4m3: groups of 32 channels in 32 rows.
//
// Scales: f32 [E_local][256-row tiles][K blocks, padded to 2][2], so that a tile's are one bulk copy. For l1 the first
// scales the gate rows and the second the up rows of those 128 channels; for l2 they are the two 128-row blocks.
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

constexpr u32 kWeightScaleRecord = 2;  // floats for (256 weight rows, 128 of K)

// Weight scale records of one tile.
constexpr u32 scale_records(u32 k_blocks) { return align_up(k_blocks, 2u); }  // 16 bytes: the smallest bulk copy
// Of one expert's matrix.
constexpr u64 l1_scale_records(const MegaMoeConfig& c) { return u64(c.l1_n_tiles()) * scale_records(c.l1_k_blocks()); }
constexpr u64 l2_scale_records(const MegaMoeConfig& c) { return u64(c.l2_n_tiles()) * scale_records(c.l2_k_blocks()); }

constexpr u32 kL1GroupChannels = 64;  // a thread of a quad holds 16 of them: 16 bytes of e4m3
constexpr u32 kL2GroupChannels = 32;  // 8 of them: 16 bytes of bf16

constexpr u32 l1_rows(const MegaMoeConfig& c) { return 2 * align_up(c.intermediate, kL1GroupChannels); }

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

}  // namespace deep_moe
