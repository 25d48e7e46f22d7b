// Routing where there is one rank and few entries: every CTA counts for itself, so that its first weights are asked for
// without a word from another CTA. An expert's rows are numbered in the order of their entries.
#pragma once

#include "deep_moe/comm/receive.h"
#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct LoneRank {
    static constexpr u32 kExperts = kConfig.num_experts;

    // One warp of every CTA, before sync_block(): no need to know how many tokens there are.
    static DM_DEVICE void read_entries(const Context<kConfig>& ctx) {
        constexpr u64 kMost = min_of<u64>(kMaxLoneEntries, u64(kConfig.max_tokens_per_rank) * kConfig.num_topk);
        DM_UNROLL
        for (u32 base = 0; base < kMaxLoneEntries; base += kWarpSize) {
            const u32 entry = base + hw::lane_idx();
            if (entry < kMost)
                hw::store_shared(experts_of_entries(ctx) + entry, u16(Route<kConfig>::expert_of(ctx, entry)));
        }
    }

    // Equal in all CTAs.
    static DM_DEVICE bool applies(const Context<kConfig>& ctx) {
        return kConfig.num_ranks == 1 && ctx.num_entries() <= kMaxLoneEntries;
    }

    // One warp of every CTA.
    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        const u32 entries = ctx.num_entries();
        u32* rows = ctx.recv_rows(0, 0);
        DM_NO_UNROLL
        for (u32 e = hw::lane_idx(); e < kExperts; e += kWarpSize) hw::store_shared(rows + e, 0u);
        hw::sync_warp();
        DM_NO_UNROLL
        for (u32 entry = hw::lane_idx(); entry < entries; entry += kWarpSize) {
            const u32 expert = expert_of(ctx, entry);
            if (expert < kExperts) hw::atomic_add_shared(rows + expert, 1);
        }
        hw::sync_warp();
        ctx.trace.lap(TraceKind::Route);
        Receive<kConfig>::list_experts(ctx);
        arrive(ctx);
        ctx.trace.lap(TraceKind::Receive);
    }

    // Nobody waits for it here, but later launches count on it.
    static DM_DEVICE void arrive(const Context<kConfig>& ctx) {
        if (hw::block_idx() == 0) Arrivals<BufferField::CountFlags>::arrive(ctx, 1);
    }

    // One warp of the first CTA, after counts_ready: for the reader of a trace, where Route's counts would be.
    static DM_DEVICE void record_counts(const Context<kConfig>& ctx) {
        u32* counts = ctx.template own<BufferField::RecvCounts>();
        for (u32 e = hw::lane_idx(); e < kExperts; e += kWarpSize) hw::store(counts + e, 0u);
        hw::sync_warp();
        for (u32 i = hw::lane_idx(); i < ctx.num_touched(); i += kWarpSize)
            hw::store(counts + ctx.touched_expert(i), ctx.expert_rows(ctx.touched_expert(i)));
    }

    // Expert of an entry, or kExperts for none. After read_entries.
    static DM_DEVICE u32 expert_of(const Context<kConfig>& ctx, u32 entry) {
        return entry < ctx.num_entries() ? hw::load_shared(experts_of_entries(ctx) + entry) : kExperts;
    }

    // The entry of an expert's row. Warp-collective.
    static DM_DEVICE u32 entry_of(const Context<kConfig>& ctx, u32 expert, u32 row) {
        for (u32 base = 0;; base += kWarpSize) {
            u32 found = hw::ballot(expert_of(ctx, base + hw::lane_idx()) == expert);
            const u32 rows = hw::popcount(found);
            if (row >= rows) {
                row -= rows;
                continue;
            }
            for (; row > 0; --row) found &= found - 1;
            return base + hw::lowest_bit(found);
        }
    }

private:
    static DM_DEVICE u16* experts_of_entries(const Context<kConfig>& ctx) {
        return ctx.template shared<SmemField::Entries, u16>();
    }
};

}  // namespace deep_moe
