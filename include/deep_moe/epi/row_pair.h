// Longer stores: threads four lanes apart hold adjacent rows. Of each row a quad holds 64 adjacent bytes at a time; after an
// exchange of every second chunk, eight threads store 128 adjacent bytes of one row.
#pragma once

#include "deep_moe/hw/hw.h"

namespace deep_moe {

struct RowPair {
    bool odd;   // whether this thread's row is the second of the pair
    u32 chunk;  // which 16 of the 128 bytes this thread stores, of both rows

    DM_DEVICE RowPair() : odd(hw::lane_idx() / 4 % 2 != 0), chunk(hw::lane_idx() % 8) {}

    // Collective over the warp. Before: two chunks of this thread's row, 64 bytes apart. After: one of the first row, one
    // of the second.
    DM_DEVICE void exchange(Vec16& first, Vec16& second) const {
        DM_UNROLL
        for (u32 w = 0; w < 4; ++w) {
            const u32 keep = odd ? second.w[w] : first.w[w];
            const u32 got = hw::shfl_xor(odd ? first.w[w] : second.w[w], 4);
            first.w[w] = odd ? got : keep;
            second.w[w] = odd ? keep : got;
        }
    }
};

}  // namespace deep_moe
