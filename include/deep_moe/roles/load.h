// The two loader threads. LoadB walks the schedule, publishes every tile and streams its weights, without waiting for
// rows; LoadA waits until a tile's rows are complete and streams them.
#pragma once

#include "deep_moe/pipe/tasks.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct LoadBRole {
    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        const u32* expert_rows = ctx.template shared<SmemField::ExpertRows, u32>();
        hw::prefetch_tensor_map(ctx.map(MapIndex::L1Weights));
        hw::prefetch_tensor_map(ctx.map(MapIndex::L2Weights));
        TaskRing<kConfig> tasks;
        RingPosition<Context<kConfig>::kStages> stage;
        constexpr TileTask kEnd{TaskKind::End, 0, 0, 0, 0, 0};

        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);
        if (ctx.aborted()) return tasks.publish(ctx, kEnd);
        TaskOrder order(kConfig, [expert_rows](u32 e) { return hw::load_shared(expert_rows + e); });
        for (TileTask task = order.first(hw::block_idx());; task = order.next(hw::grid_dim())) {
            if (ctx.aborted()) task = kEnd;
            tasks.publish(ctx, task);
            if (task.kind == TaskKind::End) return;
            load_tile(ctx, task, stage);
        }
    }

private:
    static DM_DEVICE void load_tile(const Context<kConfig>& ctx, const TileTask& task,
                                    RingPosition<Context<kConfig>::kStages>& stage) {
        constexpr u32 kTileBytes = kBlockN * kBlockK, kRecordBytes = kWeightScaleRecord * sizeof(float);
        const bool is_l1 = task.kind == TaskKind::L1;
        const TensorMap* map = ctx.map(is_l1 ? MapIndex::L1Weights : MapIndex::L2Weights);
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const float* records =
            (is_l1 ? ctx.params.l1_scales : ctx.params.l2_scales) +
            (u64(task.expert) * ctx.n_tiles(task.kind) + task.n_tile) * k_blocks * kWeightScaleRecord;
        for (u32 kb = 0; kb < k_blocks; ++kb, stage.advance()) {
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            u64* full = ctx.barrier(ctx.barriers().full(stage.slot));
            hw::mbarrier_arrive_expect_tx(full, kTileBytes + kRecordBytes);
            hw::tma_load_3d(ctx.template shared<SmemField::B, u8>() + stage.slot * kTileBytes, map, kb * kBlockK,
                            task.n_tile * kBlockN, task.expert, full);
            hw::bulk_load(ctx.template shared<SmemField::SfB, float>() + stage.slot * kWeightScaleRecord,
                          records + kb * kWeightScaleRecord, kRecordBytes, full);
        }
    }
};

template <MegaMoeConfig kConfig>
struct LoadARole {
    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        hw::prefetch_tensor_map(ctx.map(MapIndex::L1Acts));
        hw::prefetch_tensor_map(ctx.map(MapIndex::L2Acts));
        TaskRing<kConfig> tasks;
        RingPosition<Context<kConfig>::kStages> stage;
        for (;;) {
            const TileTask task = tasks.take(ctx);
            if (task.kind == TaskKind::End) return;
            // After a failed wait the tile is computed from whatever is there and not stored.
            if (!wait_rows(ctx, task)) ctx.set_aborted();
            // Rows, scales and requantised values were written by ordinary stores or other CTAs' bulk stores.
            hw::fence_proxy_async();
            load_tile(ctx, task, stage);
        }
    }

private:
    static DM_DEVICE bool wait_rows(const Context<kConfig>& ctx, const TileTask& task) {
        if (task.kind == TaskKind::L1) {
            const u32 rows = task.rows;
            return wait_word<hw::Scope::Gpu>(ctx, WaitSite::RowsArrived, task.block,
                                             ctx.template block_counters<BufferField::RowsArrived>() + task.block,
                                             [rows](u32 n) { return n == rows; });
        }
        return wait_word<hw::Scope::Gpu>(ctx, WaitSite::L1Done, task.block,
                                         ctx.template block_counters<BufferField::L1Done>() + task.block,
                                         [](u32 n) { return n == kConfig.l1_n_tiles() * kNumMathWarps; });
    }

    static DM_DEVICE void load_tile(const Context<kConfig>& ctx, const TileTask& task,
                                    RingPosition<Context<kConfig>::kStages>& stage) {
        constexpr u32 kTileBytes = kConfig.block_m * kBlockK, kScaleBytes = kConfig.block_m * sizeof(float);
        const bool is_l1 = task.kind == TaskKind::L1;
        const TensorMap* map = ctx.map(is_l1 ? MapIndex::L1Acts : MapIndex::L2Acts);
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const float* scales =
            (is_l1 ? ctx.template own<BufferField::L1PoolSf>() : ctx.template own<BufferField::L2PoolSf>()) +
            u64(task.ring_slot) * k_blocks * kConfig.block_m;
        for (u32 kb = 0; kb < k_blocks; ++kb, stage.advance()) {
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            u64* full = ctx.barrier(ctx.barriers().full(stage.slot));
            hw::mbarrier_arrive_expect_tx(full, kTileBytes + kScaleBytes);
            hw::tma_load_2d(ctx.template shared<SmemField::A, u8>() + stage.slot * kTileBytes, map, kb * kBlockK,
                            task.ring_slot * kConfig.block_m, full);
            hw::bulk_load(ctx.template shared<SmemField::SfA, float>() + stage.slot * kConfig.block_m,
                          scales + kb * kConfig.block_m, kScaleBytes, full);
        }
    }
};

}  // namespace deep_moe
