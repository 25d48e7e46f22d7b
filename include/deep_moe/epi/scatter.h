// End of an L2 tile: rows rounded to bf16 and stored straight into the combine slots of their source ranks. A thread's
// values in four chunks of the accumulator are 8 adjacent channels (layout/weights.h): one 16-byte store.
#pragma once

#include "deep_moe/epi/accumulator.h"

namespace deep_moe {

template <MegaMoeConfig kConfig, TileSplit kSplit>
struct Scatter {
    static constexpr u32 kGroups = kPieceN / kL2GroupChannels;

    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                              const TileRows& rows, const Accumulator<kSplit>& acc) {
        const bool writes = !ctx.warp_aborted();
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            u16* row = nullptr;
            if (writes && rows.valid[r])
                row = ctx.template peer<BufferField::CombineSlots>(rows.meta[r].source_rank) +
                      rows.meta[r].slot_row * u64(kConfig.hidden);
            if (row != nullptr) store_row(task, tile, acc, r, row);
        }
    }

private:
    static DM_DEVICE void store_row(const TileTask& task, const ThreadTile<kSplit>& tile,
                                    const Accumulator<kSplit>& acc, u32 r, u16* row) {
        DM_UNROLL
        for (u32 p = 0; p < Accumulator<kSplit>::kPieces; ++p)
            DM_UNROLL
            for (u32 g = 0; g < kGroups; ++g) {
                Vec16 channels;
                DM_UNROLL
                for (u32 c = 0; c < 4; ++c) {
                    const float* v = acc.sum[p] + (g * 4 + c) * 4 + r * 2;
                    channels.w[c] = hw::pack_bf16x2(v[0], v[1]);
                }
                const u32 first = task.n_tile * kBlockN + tile.piece_column(p) + g * kL2GroupChannels;
                if (first < kConfig.hidden)
                    hw::store(reinterpret_cast<Vec16*>(row + first + tile.quad_lane * 8), channels);
            }
    }
};

}  // namespace deep_moe
