// One rank alone with few rows: they are not pulled. The loader takes each row of an L1 tile from where it was staged, and
// what the pull would have stored beside the rows every CTA keeps in shared memory for itself. That saves four ways
// through memory between the counts and the first tile.
//
// NOTES: rows of other ranks the same way, over NVLink, were slower than the pull: the first tile began 1 us later.
#pragma once

#include "deep_moe/comm/lone_rank.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct DirectRows {
    // Equal in all CTAs.
    static DM_DEVICE bool applies(const Context<kConfig>& ctx) {
        return kConfig.has_direct_rows() && ctx.num_tokens() <= kMaxDirectTokens && ctx.num_entries() <= kMaxDirectRows;
    }
    // The same for a whole warp: the compiler sees that its lanes stay together.
    static DM_DEVICE bool applies_to_warp(const Context<kConfig>& ctx) {
        return kConfig.has_direct_rows() && hw::all_lanes(applies(ctx));
    }

    // One warp of every CTA, before sync_block(): no need to know how many tokens there are.
    static DM_DEVICE void read_tokens(const Context<kConfig>& ctx) {
        constexpr u32 kTokens = min_of(kMaxDirectTokens, kConfig.max_tokens_per_rank);
        constexpr u32 kScales = kTokens * kKBlocks, kEntries = min_of(kMaxDirectRows, kTokens * kConfig.num_topk);
        const u32 entry = hw::lane_idx();
        if (entry < kEntries)
            hw::store_shared(weights(ctx) + entry, hw::load(ctx.template own<BufferField::TopkWeights>() + entry));
        DM_UNROLL
        for (u32 base = 0; base < kScales; base += kWarpSize) {
            const u32 i = base + hw::lane_idx();
            if (i < kScales) hw::store_shared(scales(ctx) + i, hw::load(ctx.template own<BufferField::XSf>() + i));
        }
    }

    // One warp of every CTA, in LoneRank's place: experts in ascending order, the rows of each in that of their entries.
    static DM_DEVICE void route(const Context<kConfig>& ctx) {
        static_assert(kMaxDirectRows == kWarpSize);
        const u32 entry = hw::lane_idx(), below = (1u << entry) - 1;
        u32 left = LoneRank<kConfig>::expert_of(ctx, entry), touched = 0, block = 0;
        for (;;) {
            const u32 expert = hw::min_of_lanes(left);
            if (expert == kConfig.num_experts) break;
            const bool here = left == expert;
            const u32 entries_here = hw::ballot(here), rows = hw::popcount(entries_here);
            if (here) {
                const u32 row = hw::popcount(entries_here & below);
                hw::store_shared(entries(ctx) + block * kConfig.block_m + row, u8(entry));
                left = kConfig.num_experts;
            }
            if (entry == 0) {
                hw::store_shared(ctx.template shared<SmemField::Touched, u16>() + touched, u16(expert));
                hw::store_shared(ctx.recv_rows(0, expert), rows);
            }
            ++touched;
            block += ceil_div(rows, kConfig.block_m);
        }
        ctx.trace.lap(TraceKind::Route);
        if (entry == 0) Receive<kConfig>::announce(ctx, touched, block);
        LoneRank<kConfig>::arrive(ctx);
        ctx.trace.lap(TraceKind::Receive);
    }

    // Of a row that is there. After counts_ready.
    static DM_DEVICE u32 token_of(const Context<kConfig>& ctx, u32 block, u32 row) {
        return entry_of(ctx, block, row) / kConfig.num_topk;
    }
    static DM_DEVICE RowMeta meta_of(const Context<kConfig>& ctx, u32 block, u32 row) {
        const u32 entry = entry_of(ctx, block, row);
        return row_meta(kConfig, 0, entry, hw::load_shared(weights(ctx) + entry));
    }
    // [K blocks]; of a row that is not there those of the tile's last.
    static DM_DEVICE const float* scales_of(const Context<kConfig>& ctx, const TileTask& task, u32 row) {
        return scales(ctx) + token_of(ctx, task.block, min_of(row, task.rows - 1u)) * kKBlocks;
    }

private:
    static constexpr u32 kKBlocks = kConfig.l1_k_blocks();

    static DM_DEVICE u32 entry_of(const Context<kConfig>& ctx, u32 block, u32 row) {
        return hw::load_shared(entries(ctx) + block * kConfig.block_m + row);
    }
    static DM_DEVICE u8* entries(const Context<kConfig>& ctx) { return ctx.template shared<SmemField::DirectEntries, u8>(); }
    static DM_DEVICE float* weights(const Context<kConfig>& ctx) {
        return ctx.template shared<SmemField::DirectWeights, float>();
    }
    static DM_DEVICE float* scales(const Context<kConfig>& ctx) {
        static_assert(kMaxDirectTokens * kKBlocks * sizeof(float) <= align_up(kConfig.hidden, 128u));
        return ctx.template shared<SmemField::RowBuffer, float>();
    }
};

}  // namespace deep_moe
