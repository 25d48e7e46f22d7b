// Transformed weights: one set of bytes that every variant of every buffer reads.
//
// l1 [E_local][2I][H] e4m3: gate and up rows interleaved by 8 (g0..7, u0..7, g8..15, ...), so that one thread's
//     accumulators hold both values of a channel. l2 [E_local][H][I] e4m3: as given.
// Scales: one record of 4 floats per (256 weight rows, 128 of K): {first, second, 0, 0}. For l1, first scales the
//     gate rows and second the up rows of those 128 channels; for l2, first and second are the two 128-row blocks.
//     16 bytes are the smallest bulk copy, so a record travels with the K block that it scales.
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

constexpr u32 kWeightScaleRecord = 4;  // floats

constexpr u64 l1_scale_records(const MegaMoeConfig& c) { return u64(c.l1_n_tiles()) * c.l1_k_blocks(); }
constexpr u64 l2_scale_records(const MegaMoeConfig& c) { return u64(c.l2_n_tiles()) * c.l2_k_blocks(); }

// Row of the interleaved l1 matrix that holds gate (or up) channel `channel`.
constexpr u32 l1_row_of(u32 channel, bool is_up) {
    return channel / kInterleave * (2 * kInterleave) + (is_up ? kInterleave : 0) + channel % kInterleave;
}

}  // namespace deep_moe
