// The tile entries that the scheduler (LoadB) publishes and LoadA and the math warps replay.
#pragma once

#include "deep_moe/comm/wait.h"
#include "deep_moe/pipe/ring.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct TaskRing {
    RingPosition<kTaskDepth> position;

    // Scheduler, one thread.
    DM_DEVICE void publish(const Context<kConfig>& ctx, const TileTask& task) {
        wait_barrier(ctx, ctx.barriers().task_empty(position.slot), position.empty_parity());
        hw::store_shared(ctx.template shared<SmemField::Tasks, TileTask>() + position.slot, task);
        hw::mbarrier_arrive(ctx.barrier(ctx.barriers().task_full(position.slot)));
        position.advance();
    }

    // One thread (LoadA).
    DM_DEVICE TileTask take(const Context<kConfig>& ctx) {
        const TileTask task = read(ctx);
        release(ctx);
        return task;
    }

    // A whole warp: every lane reads, one releases.
    DM_DEVICE TileTask take_warp(const Context<kConfig>& ctx) {
        const TileTask task = read(ctx);
        hw::sync_warp();
        if (hw::lane_idx() == 0)
            release(ctx);
        else
            position.advance();
        return task;
    }

private:
    DM_DEVICE TileTask read(const Context<kConfig>& ctx) const {
        wait_barrier(ctx, ctx.barriers().task_full(position.slot), position.full_parity());
        return hw::load_shared(ctx.template shared<SmemField::Tasks, TileTask>() + position.slot);
    }
    DM_DEVICE void release(const Context<kConfig>& ctx) {
        hw::mbarrier_arrive(ctx.barrier(ctx.barriers().task_empty(position.slot)));
        position.advance();
    }
};

}  // namespace deep_moe
