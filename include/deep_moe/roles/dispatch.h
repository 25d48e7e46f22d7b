// The two dispatch warps: route this rank's tokens, learn what comes from all ranks, pull it.
#pragma once

#include "deep_moe/comm/pull.h"
#include "deep_moe/comm/receive.h"
#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct DispatchRole {
    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 warp) {
        if (warp == 0) {
            // Nobody takes a place before this CTA has routed: all wait for the counts of their own rank.
            if (hw::block_idx() == 0 && hw::lane_idx() == 0) hw::store(ctx.places_taken(), 0u);
            clear_other_bank(ctx);
            const bool ok = Route<kConfig>::run(ctx) && Receive<kConfig>::run(ctx);
            if (!ok && hw::lane_idx() == 0) ctx.set_aborted();
            hw::fence_proxy_async();  // where routing worked, stages will be loaded
            hw::sync_warp();
            if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(ctx.barriers().counts_ready()));
        }
        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);
        ctx.trace.lap(TraceKind::WaitCounts);
        if (!ctx.warp_aborted() && !Pull<kConfig>::run(ctx, warp) && hw::lane_idx() == 0) ctx.set_aborted();
    }

private:
    // The next launch counts in the bank that the last launch used.
    static DM_DEVICE void clear_other_bank(const Context<kConfig>& ctx) {
        const u32 bank = (ctx.epoch() + 1) & 1, stride = hw::grid_dim() * kWarpSize,
                  begin = hw::block_idx() * kWarpSize + hw::lane_idx();
        if (begin == 0) hw::store(ctx.template own<BufferField::Header>()->count_arrivals + bank, 0u);
        for (u32 e = begin; e < kConfig.num_experts; e += stride)
            hw::store(ctx.template own<BufferField::SendCounts>() + bank * kConfig.num_experts + e, 0u);
        const u64 other = u64(bank) * kConfig.max_blocks();
        for (u32 i = begin; i < kConfig.max_blocks(); i += stride) {
            hw::store(ctx.template own<BufferField::RowsArrived>() + other + i, 0u);
            hw::store(ctx.template own<BufferField::L1Done>() + other + i, 0u);
            hw::store(ctx.template own<BufferField::L2Done>() + other + i, 0u);
        }
    }
};

}  // namespace deep_moe
