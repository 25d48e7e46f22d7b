// Learning what will come: waits for every source's flag and puts the counts into shared memory.
#pragma once

#include "deep_moe/comm/wait.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Receive {
    static constexpr u32 kLocal = kConfig.experts_per_rank();

    // One warp of every CTA. False when the launch is to be abandoned.
    static DM_DEVICE bool run(const Context<kConfig>& ctx) {
        bool ok = true;
        DM_NO_UNROLL
        for (u32 source = hw::lane_idx(); source < kConfig.num_ranks; source += kWarpSize)
            ok = ok && wait_flag(ctx, source);
        hw::sync_warp();
        ctx.trace.lap(TraceKind::WaitCountFlags);
        if (!hw::all_lanes(ok)) return false;

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

private:
    // The flag of this launch has come, and the source works with the same bound class.
    static DM_DEVICE bool wait_flag(const Context<kConfig>& ctx, u32 source) {
        const u32 epoch = ctx.epoch();
        u64 flag = 0;
        const bool ok = wait_word<hw::Scope::Sys>(ctx, WaitSite::CountFlag, source,
                                                  ctx.template own<BufferField::CountFlags>() + source, [&](u64 word) {
                                                      flag = word;
                                                      return u32(word >> 32) == epoch;
                                                  });
        if (ok && u32(flag) != kConfig.bound_class) {
            raise_abort(ctx, AbortCode::BoundMismatch, WaitSite::CountFlag, source);
            check_abort(ctx);
            return false;
        }
        return ok;
    }
};

}  // namespace deep_moe
