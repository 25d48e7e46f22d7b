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
            if (hw::block_idx() == 0 && ctx.params.recv_stats != nullptr)
                hw::store(ctx.params.recv_stats + e, hw::load(ctx.params.recv_stats + e) + i32(rows));
        }
        ctx.trace.lap(TraceKind::Receive);
        return true;
    }
};

}  // namespace deep_moe
