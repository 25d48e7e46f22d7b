// The math warps' side of the ring of pipeline stages.
#pragma once

#include "deep_moe/comm/wait.h"
#include "deep_moe/pipe/ring.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
DM_DEVICE void wait_full(const Context<kConfig>& ctx, const RingPosition<Context<kConfig>::kStages>& stage) {
    wait_barrier(ctx, ctx.barriers().full(stage.slot), stage.full_parity());
}

// Without waiting.
template <MegaMoeConfig kConfig>
DM_DEVICE bool is_full(const Context<kConfig>& ctx, const RingPosition<Context<kConfig>::kStages>& stage) {
    return hw::mbarrier_test_wait(ctx.barrier(ctx.barriers().full(stage.slot)), stage.full_parity());
}

// This warp has read the stage for the last time.
template <MegaMoeConfig kConfig>
DM_DEVICE void release(const Context<kConfig>& ctx, const RingPosition<Context<kConfig>::kStages>& stage) {
    hw::sync_warp();
    if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(ctx.barriers().empty(stage.slot)));
}

}  // namespace deep_moe
