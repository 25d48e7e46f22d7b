// The two dispatch warps. The first routes this rank's tokens and learns what comes from all ranks, while the second
// asks for weights and clears counters; then one or both pull rows, unless they are few enough to be left where they are.
#pragma once

#include "deep_moe/comm/direct_rows.h"
#include "deep_moe/comm/early_weights.h"
#include "deep_moe/comm/pull.h"
#include "deep_moe/comm/receive.h"
#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct DispatchRole {
    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 warp) {
        if (warp == 0) {
            const bool ok = !ctx.warp_aborted() && route(ctx);
            if (!ok && hw::lane_idx() == 0) ctx.set_aborted();
            hw::fence_proxy_async();  // where routing worked, stages will be loaded
            hw::sync_warp();
            if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(ctx.barriers().counts_ready()));
        } else if (warp == 1) {
            EarlyWeights<kConfig>::prefetch(ctx);
            clear_other_bank(ctx);
        }
        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);
        ctx.trace.lap(TraceKind::WaitCounts);
        if (ctx.warp_aborted()) return;
        const bool pulls = warp < kConfig.pull_warps() && !DirectRows<kConfig>::applies(ctx);
        if (pulls && !Pull<kConfig>::run(ctx, warp) && hw::lane_idx() == 0) ctx.set_aborted();
        if (warp != 1 || hw::block_idx() != 0) return;
        Receive<kConfig>::add_statistics(ctx);
        if constexpr (kConfig.trace_events > 0)
            if (LoneRank<kConfig>::applies(ctx)) LoneRank<kConfig>::record_counts(ctx);
    }

    // While shared memory is made ready: what the routing and the first pulled rows will read comes into the L2 cache,
    // and a lone rank's first entries into shared memory.
    static DM_DEVICE void prefetch(const Context<kConfig>& ctx) {
        constexpr u32 kLine = 128;
        constexpr u64 kEntryBytes = u64(kConfig.max_tokens_per_rank) * kConfig.num_topk * sizeof(i32);
        const u32 first = hw::lane_idx() * kLine, token = hw::block_idx();
        if (first < kEntryBytes) hw::prefetch(ctx.template own<BufferField::TopkIdx>() + first / sizeof(i32));
        if constexpr (kConfig.num_ranks == 1) LoneRank<kConfig>::read_entries(ctx);
        if (token >= kConfig.max_tokens_per_rank) return;
        const u8* row = ctx.template own<BufferField::X>() + token * u64(kConfig.hidden);
        for (u32 byte = first; byte < kConfig.hidden; byte += kWarpSize * kLine) hw::prefetch(row + byte);
        if (hw::lane_idx() != 0) return;
        hw::prefetch(ctx.template own<BufferField::XSf>() + token * u64(kConfig.l1_k_blocks()));
        hw::prefetch(ctx.template own<BufferField::TopkWeights>() + token * kConfig.num_topk);
    }

private:
    // Until this CTA knows what will come. False when the launch is to be abandoned.
    static DM_DEVICE bool route(const Context<kConfig>& ctx) {
        if (DirectRows<kConfig>::applies(ctx))
            DirectRows<kConfig>::route(ctx);
        else if (LoneRank<kConfig>::applies(ctx))
            LoneRank<kConfig>::run(ctx);
        else
            return Route<kConfig>::run(ctx) && Receive<kConfig>::run(ctx);
        return true;
    }

    // The next launch counts in the bank that the last launch used.
    static DM_DEVICE void clear_other_bank(const Context<kConfig>& ctx) {
        const u32 bank = (ctx.epoch() + 1) & 1, stride = hw::grid_dim() * kWarpSize,
                  begin = hw::block_idx() * kWarpSize + hw::lane_idx();
        BufferHeader* header = ctx.template own<BufferField::Header>();
        const u32 used = min_of(hw::load(header->blocks_used + bank), kConfig.max_blocks());
        if (begin == 0) {
            hw::store(header->count_arrivals + bank, 0u);
            hw::store(header->places_taken + bank, 0u);
        }
        for (u32 e = begin; e < kConfig.num_experts; e += stride)
            hw::store(ctx.template own<BufferField::SendCounts>() + bank * kConfig.num_experts + e, 0u);
        const u64 other = u64(bank) * kConfig.max_blocks();
        for (u32 i = begin; i < used; i += stride) {
            hw::store(ctx.template own<BufferField::RowsArrived>() + other + i, 0u);
            hw::store(ctx.template own<BufferField::L1Done>() + other + i, 0u);
            hw::store(ctx.template own<BufferField::L2Done>() + other + i, 0u);
        }
    }
};

}  // namespace deep_moe
