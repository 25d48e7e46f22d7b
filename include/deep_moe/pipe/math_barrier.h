// Where the math warps of a CTA meet.
#pragma once

#include "deep_moe/comm/wait.h"

namespace deep_moe {

struct MathBarrier {
    u32 meetings = 0;  // so far; all math warps agree

    // Collective over the math warps: what each did before is visible to all behind it.
    template <MegaMoeConfig kConfig>
    DM_DEVICE void meet(const Context<kConfig>& ctx) {
        hw::sync_warp();
        if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(ctx.barriers().math()));
        wait_barrier(ctx, ctx.barriers().math(), meetings % 2);
        ++meetings;
    }
};

}  // namespace deep_moe
