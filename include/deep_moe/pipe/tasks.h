// The tile entries that the scheduler (LoadB) publishes and LoadA and the math warps replay.
#pragma once

#include "deep_moe/comm/wait.h"
#include "deep_moe/pipe/ring.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct TaskRing {
    RingPosition<kTaskDepth> position;

    // Scheduler, one thread.
    // weight_slot: the first one of its decoded weights (sched/decode_plan.h).
    DM_DEVICE void publish(const Context<kConfig>& ctx, const TileTask& task, u32 weight_slot = 0) {
        wait_barrier(ctx, ctx.barriers().task_empty(position.slot), position.empty_parity());
        hw::store_shared(ctx.template shared<SmemField::Tasks, TileTask>() + position.slot, task);
        if constexpr (kConfig.decodes_ahead()) hw::store_shared(weight_slot_at(ctx), weight_slot);
        hw::mbarrier_arrive(ctx.barrier(ctx.barriers().task_full(position.slot)));
        position.advance();
    }

    // One thread (LoadA).
    DM_DEVICE TileTask take(const Context<kConfig>& ctx, [[maybe_unused]] u32& weight_slot) {
        const TileTask task = read(ctx);
        if constexpr (kConfig.decodes_ahead()) weight_slot = hw::load_shared(weight_slot_at(ctx));
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
    DM_DEVICE u32* weight_slot_at(const Context<kConfig>& ctx) const {
        return ctx.template shared<SmemField::Tasks, u32>() + kTaskDepth * 4 + position.slot;
    }
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
