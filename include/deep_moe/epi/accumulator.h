// A warpgroup's part of a tile in registers, and which rows and columns of it a thread holds.
#pragma once

#include "deep_moe/comm/direct_rows.h"
#include "deep_moe/mma/promote.h"

namespace deep_moe {

// How the two math warpgroups share a tile: 64 rows and all 256 columns each, or, when the tile has at most 64 rows,
// 128 columns each.
enum class TileSplit : u32 { Rows, Columns };

template <TileSplit kSplit>
struct Accumulator {
    static constexpr u32 kPieces =
        kSplit == TileSplit::Rows ? kBlockN / kPieceN : kBlockN / kPieceN / kFp8MathWarpgroups;

    float sum[kPieces][kPieceRegisters];

    DM_DEVICE void clear() {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < kPieceRegisters; ++i) sum[p][i] = 0.0f;
    }
};

// Where a math thread's part of the CTA tile lies.
template <TileSplit kSplit>
struct ThreadTile {
    static constexpr bool kByColumns = kSplit == TileSplit::Columns;
    static constexpr u32 kPieces = Accumulator<kSplit>::kPieces;

    u32 warpgroup;
    u32 first_row;  // within the block; the thread's second row is 8 further
    u32 quad_lane;  // holds columns 2 * quad_lane, + 1 of every chunk of 8 columns

    DM_DEVICE explicit ThreadTile(u32 math_warp)
        : warpgroup(math_warp / 4),
          first_row(a_row() + math_warp % 4 * 16 + hw::lane_idx() / 4),
          quad_lane(hw::lane_idx() % 4) {}

    DM_DEVICE u32 row(u32 r) const { return first_row + 8 * r; }
    DM_DEVICE u32 warp_row() const { return first_row - hw::lane_idx() / 4; }  // the first of its warp
    DM_DEVICE bool valid(const TileTask& task, u32 r) const { return row(r) < task.rows; }
    // Rows of A and B where this warpgroup's operands start.
    DM_DEVICE u32 a_row() const { return kByColumns ? 0 : warpgroup * kWarpgroupRows; }
    DM_DEVICE u32 b_row() const { return kByColumns ? warpgroup * kPieces * kPieceN : 0; }
    // Column of the CTA tile where piece p starts.
    DM_DEVICE u32 piece_column(u32 p) const { return b_row() + p * kPieceN; }
};

// Meta data of the warp's 16 rows, one in each of the first 16 lanes: registers are short. Loaded when the tile's first
// stage has come (its rows are there then) and used after the last: the latency is hidden behind the multiplication.
class TileRows {
public:
    template <MegaMoeConfig kConfig, typename Tile>
    DM_DEVICE TileRows(const Context<kConfig>& ctx, const TileTask& task, const Tile& tile) {
        const u32 row = tile.warp_row() + hw::lane_idx();
        if (hw::lane_idx() >= 16 || row >= task.rows) return;
        if (DirectRows<kConfig>::applies_to_warp(ctx))
            held_ = DirectRows<kConfig>::meta_of(ctx, task.block, row);
        else
            held_ = hw::load(ctx.template own<BufferField::RowMeta>() + task.ring_slot * kConfig.block_m + row);
    }

    // Of a thread's two rows. Collective over the warp; zero if the row is not valid.
    DM_DEVICE float weight(u32 r) const { return hw::shfl(held_.weight, lane_of(r)); }
    DM_DEVICE u32 source_rank(u32 r) const { return hw::shfl(held_.source_rank, lane_of(r)); }
    DM_DEVICE u32 slot_row(u32 r) const { return hw::shfl(held_.slot_row, lane_of(r)); }

private:
    static DM_DEVICE u32 lane_of(u32 r) { return hw::lane_idx() / 4 + 8 * r; }

    RowMeta held_{};
};

}  // namespace deep_moe
