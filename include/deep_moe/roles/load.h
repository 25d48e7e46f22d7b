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
        ctx.trace.lap(TraceKind::WaitCounts);
        if (ctx.aborted()) return tasks.publish(ctx, kEnd);
        TaskOrder order(kConfig, [expert_rows](u32 e) { return hw::load_shared(expert_rows + e); });
        u32 place = hw::block_idx();
        TileTask task = order.first(place);
        for (;;) {
            if (ctx.aborted()) task = kEnd;
            tasks.publish(ctx, task);
            ctx.trace.lap(TraceKind::PublishTask);
            if (task.kind == TaskKind::End) return;
            const u32 next = load_tile(ctx, task, stage);
            ctx.trace.lap(TraceKind::Load, task);
            task = order.next(next - place);
            place = next;
        }
    }

private:
    // The next free place in the order.
    static DM_DEVICE u32 next_place(const Context<kConfig>& ctx) {
        return hw::grid_dim() + hw::atomic_add_relaxed_gpu(ctx.places_taken(), 1);
    }

    // Loads the tile's weights and returns the place of the next tile.
    static DM_DEVICE u32 load_tile(const Context<kConfig>& ctx, const TileTask& task,
                                   RingPosition<Context<kConfig>::kStages>& stage) {
        constexpr u32 kTileBytes = kBlockN * kBlockK, kRecordBytes = kWeightScaleRecord * sizeof(float);
        const bool is_l1 = task.kind == TaskKind::L1;
        const TensorMap* map = ctx.map(is_l1 ? MapIndex::L1Weights : MapIndex::L2Weights);
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const float* records =
            (is_l1 ? ctx.params.l1_scales : ctx.params.l2_scales) +
            (u64(task.expert) * ctx.n_tiles(task.kind) + task.n_tile) * k_blocks * kWeightScaleRecord;
        // NOTES: the place is asked for as late as its way to memory and back allows. A whole tile earlier the last tiles
        // would go to CTAs that are not ready for them (9 % at 1024 tokens); at the end of the tile the math warps would
        // wait for it (5 %).
        const u32 ask_at = k_blocks - min_of(k_blocks, 2u);
        u32 next = 0;
        for (u32 kb = 0; kb < k_blocks; ++kb, stage.advance()) {
            if (kb == ask_at) next = next_place(ctx);
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            u64* full = ctx.barrier(ctx.barriers().full(stage.slot));
            hw::mbarrier_arrive_expect_tx(full, kTileBytes + kRecordBytes);
            hw::tma_load_3d(ctx.template shared<SmemField::B, u8>() + stage.slot * kTileBytes, map, kb * kBlockK,
                            task.n_tile * kBlockN, task.expert, full);
            hw::bulk_load(ctx.template shared<SmemField::SfB, float>() + stage.slot * kWeightScaleRecord,
                          records + kb * kWeightScaleRecord, kRecordBytes, full);
        }
        return next;
    }
};

template <MegaMoeConfig kConfig>
struct LoadARole {
    using Stage = RingPosition<Context<kConfig>::kStages>;

    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        hw::prefetch_tensor_map(ctx.map(MapIndex::L1Acts));
        hw::prefetch_tensor_map(ctx.map(MapIndex::L2Acts));
        TaskRing<kConfig> tasks;
        Stage stage;
        Finished finished;
        for (;;) {
            const RingPosition<kTaskDepth> entry = tasks.position;
            const TileTask task = tasks.take(ctx);
            ctx.trace.lap(TraceKind::WaitTask, task);
            if (task.kind == TaskKind::End) return announce(ctx, finished, entry);
            const u32* ready = ready_word(ctx, task);
            if (hw::load_acquire<hw::Scope::Gpu>(ready) != ready_count(task)) {
                announce(ctx, finished, entry);  // what this tile waits for may be the tile before it
                // After a failed wait the tile is computed from whatever is there and not stored.
                if (!wait_rows(ctx, task, ready)) ctx.set_aborted();
            }
            ctx.trace.lap(TraceKind::WaitRows, task);
            // Rows, scales and requantised values were written by ordinary stores or other CTAs' bulk stores.
            hw::fence_proxy_async();
            load_tile(ctx, task, stage, finished, entry);
            ctx.trace.lap(TraceKind::Load, task);
            finished.done = done_word(ctx, task);
        }
    }

private:
    // The tile before the current one, until other CTAs and the dispatch warps have been told that it is stored.
    struct Finished {
        u32* done = nullptr;
    };

    // The math warps take `next`, the entry after the finished tile's, when they have stored their part of it. The loader
    // tells the others in their place: a release waits until every store has reached its memory.
    static DM_DEVICE void announce(const Context<kConfig>& ctx, Finished& finished,
                                   const RingPosition<kTaskDepth>& next) {
        if (finished.done == nullptr) return;
        wait_barrier(ctx, ctx.barriers().task_empty(next.slot), next.full_parity());
        hw::add_release_gpu(finished.done, 1);
        finished.done = nullptr;
    }

    static DM_DEVICE u32* done_word(const Context<kConfig>& ctx, const TileTask& task) {
        return (task.kind == TaskKind::L1 ? ctx.template block_counters<BufferField::L1Done>()
                                          : ctx.template block_counters<BufferField::L2Done>()) +
               task.block;
    }

    // What must have been counted before the tile's rows can be read: rows pulled for L1, L1 tiles stored for L2.
    static DM_DEVICE const u32* ready_word(const Context<kConfig>& ctx, const TileTask& task) {
        return (task.kind == TaskKind::L1 ? ctx.template block_counters<BufferField::RowsArrived>()
                                          : ctx.template block_counters<BufferField::L1Done>()) +
               task.block;
    }
    static DM_DEVICE u32 ready_count(const TileTask& task) {
        return task.kind == TaskKind::L1 ? task.rows : kConfig.l1_n_tiles();
    }
    static DM_DEVICE bool wait_rows(const Context<kConfig>& ctx, const TileTask& task, const u32* ready) {
        const u32 count = ready_count(task);
        return wait_word<hw::Scope::Gpu>(ctx, task.kind == TaskKind::L1 ? WaitSite::RowsArrived : WaitSite::L1Done,
                                         task.block, ready, [count](u32 n) { return n == count; });
    }

    static DM_DEVICE void load_tile(const Context<kConfig>& ctx, const TileTask& task, Stage& stage, Finished& finished,
                                    const RingPosition<kTaskDepth>& entry) {
        constexpr u32 kTileBytes = kConfig.block_m * kBlockK, kScaleBytes = kConfig.block_m * sizeof(float);
        const bool is_l1 = task.kind == TaskKind::L1;
        const TensorMap* map = ctx.map(is_l1 ? MapIndex::L1Acts : MapIndex::L2Acts);
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const float* scales =
            (is_l1 ? ctx.template own<BufferField::L1PoolSf>() : ctx.template own<BufferField::L2PoolSf>()) +
            u64(task.ring_slot) * k_blocks * kConfig.block_m;
        for (u32 kb = 0; kb < k_blocks; ++kb, stage.advance()) {
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            // NOTES: not earlier. By now the math warps have used a stage of this tile, so they are past the epilogue of
            // the one before and its stores are under way since a while: the release hardly waits.
            if (kb == Context<kConfig>::kStages) announce(ctx, finished, entry);
            u64* full = ctx.barrier(ctx.barriers().full(stage.slot));
            hw::mbarrier_arrive_expect_tx(full, kTileBytes + kScaleBytes);
            hw::tma_load_2d(ctx.template shared<SmemField::A, u8>() + stage.slot * kTileBytes, map, kb * kBlockK,
                            task.ring_slot * kConfig.block_m, full);
            hw::bulk_load(ctx.template shared<SmemField::SfA, float>() + stage.slot * kConfig.block_m,
                          scales + kb * kConfig.block_m, kScaleBytes, full);
        }
        announce(ctx, finished, entry);
    }
};

}  // namespace deep_moe
