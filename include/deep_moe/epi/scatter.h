// End of an L2 tile: rows rounded to bf16 and stored straight into the combine slots of their source ranks. A thread's
// values in four chunks of the accumulator are 8 adjacent channels (layout/weights.h): one 16-byte store.
#pragma once

#include "deep_moe/epi/accumulator.h"
#include "deep_moe/epi/row_pair.h"

namespace deep_moe {

template <MegaMoeConfig kConfig, TileSplit kSplit>
struct Scatter {
    static constexpr u32 kGroups = kPieceN / kL2GroupChannels;

    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                              const TileRows& rows, const Accumulator<kSplit>& acc) {
        const bool writes = !ctx.warp_aborted();
        const RowPair pair;
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            u16* row = nullptr;
            if (writes && rows.valid[r])
                row = ctx.template peer<BufferField::CombineSlots>(rows.meta[r].source_rank) +
                      rows.meta[r].slot_row * u64(kConfig.hidden);
            u16* partner = reinterpret_cast<u16*>(hw::shfl_xor(reinterpret_cast<u64>(row), 4));
            store_rows(task, tile, acc, r, pair, pair.odd ? partner : row, pair.odd ? row : partner);
        }
    }

private:
    static DM_DEVICE void store_rows(const TileTask& task, const ThreadTile<kSplit>& tile,
                                     const Accumulator<kSplit>& acc, u32 r, const RowPair& pair, u16* even, u16* odd) {
        DM_UNROLL
        for (u32 p = 0; p < Accumulator<kSplit>::kPieces; ++p)
            DM_UNROLL
            for (u32 g = 0; g < kGroups; g += 2) {
                Vec16 first = channels(acc.sum[p] + g * 16 + r * 2), second = channels(acc.sum[p] + g * 16 + 16 + r * 2);
                pair.exchange(first, second);
                const u32 column = task.n_tile * kBlockN + tile.piece_column(p) + g * kL2GroupChannels;
                if (column < kConfig.hidden) {
                    if (even != nullptr) hw::store(reinterpret_cast<Vec16*>(even + column) + pair.chunk, first);
                    if (odd != nullptr) hw::store(reinterpret_cast<Vec16*>(odd + column) + pair.chunk, second);
                }
            }
    }

    static DM_DEVICE Vec16 channels(const float* v) {
        Vec16 packed;
        DM_UNROLL
        for (u32 c = 0; c < 4; ++c) packed.w[c] = hw::pack_bf16x2(v[c * 4], v[c * 4 + 1]);
        return packed;
    }
};

}  // namespace deep_moe
