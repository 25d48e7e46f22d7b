// A warpgroup's tile in registers, and which rows and columns of it a thread holds.
#pragma once

#include "deep_moe/kernels/context.h"
#include "deep_moe/mma/promote.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Accumulator {
    static constexpr u32 kPieces = kConfig.warpgroup_n() / kPieceN;

    float sum[kPieces][kPieceRegisters];

    DM_DEVICE void clear() {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < kPieceRegisters; ++i) sum[p][i] = 0.0f;
    }
};

// Where a math thread's part of the CTA tile lies. With block_m = 128 the warpgroups split the rows, with 64 the columns.
template <MegaMoeConfig kConfig>
struct ThreadTile {
    static constexpr bool kSplitColumns = kConfig.block_m == 64;

    u32 warpgroup;
    u32 first_row;     // within the block; the thread's second row is 8 further
    u32 quad_lane;     // holds columns 2 * quad_lane, + 1 of every chunk of 8

    DM_DEVICE explicit ThreadTile(u32 math_warp)
        : warpgroup(math_warp / 4),
          first_row((kSplitColumns ? 0 : warpgroup * 64) + math_warp % 4 * 16 + hw::lane_idx() / 4),
          quad_lane(hw::lane_idx() % 4) {}

    DM_DEVICE u32 row(u32 r) const { return first_row + 8 * r; }
    // Rows of A and B where this warpgroup's operands start.
    DM_DEVICE u32 a_row() const { return kSplitColumns ? 0 : warpgroup * 64; }
    DM_DEVICE u32 b_row() const { return kSplitColumns ? warpgroup * kConfig.warpgroup_n() : 0; }
    // Column of the CTA tile where piece p starts.
    DM_DEVICE u32 piece_column(u32 p) const { return b_row() + p * kPieceN; }
};

}  // namespace deep_moe
