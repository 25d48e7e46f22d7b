// Learning what will come: waits for all ranks, which must work with the same bound class, and puts the counts into shared memory.
#pragma once

#include "deep_moe/comm/arrivals.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Receive {
    static constexpr u32 kLocal = kConfig.experts_per_rank();

    // One warp of every CTA. False when the launch is to be abandoned.
    static DM_DEVICE bool run(const Context<kConfig>& ctx) {
        const bool ok = Arrivals<BufferField::CountFlags>::wait(ctx, WaitSite::CountFlag, hw::block_idx() == 0,
                                                                kConfig.bound_class);
        ctx.trace.lap(TraceKind::WaitCountFlags);
        if (!ok) return false;

        const u32* counts = ctx.template own<BufferField::RecvCounts>();
        DM_NO_UNROLL
        for (u32 e = hw::lane_idx(); e < kLocal; e += kWarpSize) {
            u32 rows = 0;
            DM_NO_UNROLL
            for (u32 source = 0; source < kConfig.num_ranks; ++source) {
                rows += hw::load(counts + source * kLocal + e);
                hw::store_shared(ctx.recv_rows(source, e), rows);
            }
        }
        hw::sync_warp();
        list_experts(ctx);
        ctx.trace.lap(TraceKind::Receive);
        return true;
    }

    // Once recv_rows are there: which experts have rows.
    static DM_DEVICE void list_experts(const Context<kConfig>& ctx) {
        u16* list = ctx.template shared<SmemField::Touched, u16>();
        u32 touched = 0, blocks = 0;
        DM_NO_UNROLL
        for (u32 base = 0; base < kLocal; base += kWarpSize) {
            const u32 e = base + hw::lane_idx();
            const u32 rows = e < kLocal ? ctx.expert_rows(e) : 0;
            const u32 with_rows = hw::ballot(rows != 0), below = (1u << hw::lane_idx()) - 1;
            if (rows != 0) hw::store_shared(list + touched + hw::popcount(with_rows & below), u16(e));
            touched += hw::popcount(with_rows);
            blocks += ceil_div(rows, kConfig.block_m);
        }
        for (u32 mask = 1; mask < kWarpSize; mask *= 2) blocks += hw::shfl_xor(blocks, mask);
        if (hw::lane_idx() == 0) announce(ctx, touched, blocks);
    }

    // One thread: so many experts are in the list, with so many row blocks.
    static DM_DEVICE void announce(const Context<kConfig>& ctx, u32 touched, u32 blocks) {
        u32* state = ctx.template shared<SmemField::State, u32>();
        hw::store_shared(state + 3, touched);
        hw::store_shared(state + 4, blocks);
        if (hw::block_idx() == 0)
            hw::store(ctx.template own<BufferField::Header>()->blocks_used + (ctx.epoch() & 1), blocks);
    }

    // One warp of the first CTA, after counts_ready: adds the received rows to the caller's statistics.
    static DM_DEVICE void add_statistics(const Context<kConfig>& ctx) {
        if (ctx.params.recv_stats == nullptr) return;
        DM_NO_UNROLL
        for (u32 i = hw::lane_idx(); i < ctx.num_touched(); i += kWarpSize) {
            i32* stat = ctx.params.recv_stats + ctx.touched_expert(i);
            hw::store(stat, hw::load(stat) + i32(ctx.expert_rows(ctx.touched_expert(i))));
        }
    }
};

}  // namespace deep_moe
