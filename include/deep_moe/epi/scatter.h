// End of an L2 tile: biases; then rows are rounded to bf16 and stored straight into the combine slots of their
// sources.
//
// A thread's values in four chunks of the accumulator are 8 adjacent channels (layout/weights.h), 16 bytes; a quad has 64
// bytes of a row. Threads four lanes apart hold adjacent rows, and exchange half of their channels: then eight threads
// store 128 bytes of one row. On one H200 a burst of such stores takes 2900 clocks where 64 bytes a row take 3800, and
// NVLink carries 366 GB/s instead of 330.
#pragma once

#include "deep_moe/epi/biases.h"

namespace deep_moe {

template <MegaMoeConfig kConfig, TileSplit kSplit>
struct Scatter {
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                              const TileRows& rows, Accumulator<kSplit>& acc) {
        if constexpr (kConfig.bias) TileBiases<kConfig, kSplit>::add_to_l2(ctx, task, tile, rows, acc);
        const bool writes = !ctx.warp_aborted();
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            const u32 source_rank = rows.source_rank(r), slot_row = rows.slot_row(r);
            u16* row = nullptr;
            if (writes && tile.valid(task, r))
                row = ctx.template peer<BufferField::CombineSlots>(source_rank) + slot_row * u64(kConfig.hidden);
            u16* partner = reinterpret_cast<u16*>(hw::shfl_xor(reinterpret_cast<u64>(row), kPartner));
            store_rows(task, tile, acc, r, is_second() ? partner : row, is_second() ? row : partner);
        }
    }

private:
    static constexpr u32 kGroups = kPieceN / kL2GroupChannels;
    static constexpr u32 kPartner = 4;  // lanes to the thread with the other row of a pair

    static DM_DEVICE bool is_second() { return hw::lane_idx() / kPartner % 2 != 0; }

    // The pair's rows; nullptr for one that is not stored.
    static DM_DEVICE void store_rows(const TileTask& task, const ThreadTile<kSplit>& tile,
                                     const Accumulator<kSplit>& acc, u32 r, u16* first, u16* second) {
        DM_UNROLL
        for (u32 p = 0; p < Accumulator<kSplit>::kPieces; ++p)
            DM_UNROLL
            for (u32 g = 0; g < kGroups; g += 2) {
                Vec16 of_first = channels(acc.sum[p] + g * 16 + r * 2);
                Vec16 of_second = channels(acc.sum[p] + (g + 1) * 16 + r * 2);
                exchange(of_first, of_second);
                const u32 column = task.n_tile * kBlockN + tile.piece_column(p) + g * kL2GroupChannels;
                if (column < kConfig.hidden) {
                    const u32 chunk = hw::lane_idx() % 8;
                    if (first != nullptr) hw::store(reinterpret_cast<Vec16*>(first + column) + chunk, of_first);
                    if (second != nullptr) hw::store(reinterpret_cast<Vec16*>(second + column) + chunk, of_second);
                }
            }
    }

    static DM_DEVICE Vec16 channels(const float* v) {
        Vec16 packed;
        DM_UNROLL
        for (u32 c = 0; c < 4; ++c) packed.w[c] = hw::pack_bf16x2(v[c * 4], v[c * 4 + 1]);
        return packed;
    }

    // Before: channels of this thread's row in two groups. After: of the pair's first and second row, in the first group
    // for the first thread and in the second one for the second.
    static DM_DEVICE void exchange(Vec16& a, Vec16& b) {
        DM_UNROLL
        for (u32 w = 0; w < 4; ++w) {
            const u32 keep = is_second() ? b.w[w] : a.w[w];
            const u32 got = hw::shfl_xor(is_second() ? a.w[w] : b.w[w], kPartner);
            a.w[w] = is_second() ? got : keep;
            b.w[w] = is_second() ? keep : got;
        }
    }
};

}  // namespace deep_moe
