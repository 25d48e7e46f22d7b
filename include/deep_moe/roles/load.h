// The two loader threads. LoadB walks the schedule, publishes every tile and streams its weights, without waiting for
// rows; LoadA waits until a tile's rows are complete (those that are not pulled are) and streams them. Both turn to the
// next tile before they load the last stage of a tile: what has to come from memory for it is on its way while they
// wait for that stage.
#pragma once

#include "deep_moe/comm/direct_rows.h"
#include "deep_moe/pipe/decoded_weights.h"
#include "deep_moe/pipe/tasks.h"
#include "deep_moe/roles/decode.h"
#include "deep_moe/roles/decode_ahead.h"

namespace deep_moe {

// Where LoadB puts weights: into the stages, or where decode warps find them.
template <MegaMoeConfig kConfig>
struct WeightStages {
    static constexpr bool kPacked = kConfig.has_decode_warps();
    static constexpr u32 kCount = kPacked ? kPackedStages : Context<kConfig>::kStages;
    static constexpr u32 kBytes = kPacked ? weight_block_bytes(kConfig.mma_type) : stage_weight_bytes(kConfig);
    static constexpr SmemField kField = kPacked ? SmemField::Packed : SmemField::B;
    using Position = RingPosition<kCount>;

    static DM_DEVICE u32 full(u32 slot) {
        return kPacked ? Context<kConfig>::barriers().packed_full(slot) : Context<kConfig>::barriers().full(slot);
    }
    static DM_DEVICE u32 empty(u32 slot) {
        return kPacked ? Context<kConfig>::barriers().packed_empty(slot) : Context<kConfig>::barriers().empty(slot);
    }
};

template <MegaMoeConfig kConfig>
struct LoadBRole {
    using Weights = WeightStages<kConfig>;

    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        TaskRing<kConfig> tasks;
        typename Weights::Position stage;
        const u32 k_blocks = load_tiles(ctx, tasks, stage);
        if constexpr (Weights::kPacked) DecodeRole<kConfig>::end(ctx, stage, k_blocks);
    }

private:
    // Until the End has been published. How many K blocks were loaded, where a stage holds one.
    static DM_DEVICE u32 load_tiles(const Context<kConfig>& ctx, TaskRing<kConfig>& tasks,
                                    typename Weights::Position& stage) {
        RingPosition<Context<kConfig>::kScaleTiles> scales;
        constexpr TileTask kEnd{TaskKind::End, 0, 0, 0, 0, 0};

        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);
        ctx.trace.lap(TraceKind::WaitCounts);
        if (ctx.aborted()) {
            tasks.publish(ctx, kEnd);
            return 0;
        }
        const bool evict_first = loads_evict_first(kConfig, ctx.num_touched());
        const DecodePlan plan = ctx.decode_plan();
        if constexpr (kConfig.decodes_ahead()) {
            if (plan.is_decoder(hw::block_idx())) {
                tasks.publish(ctx, {TaskKind::Decode, 0, 0, 0, 0, 0});
                DecodeAheadRole<kConfig>::load(ctx);
                tasks.publish(ctx, kEnd);
                return 0;
            }
        }
        DecodedWeights<kConfig> decoded(plan);
        TaskOrder order(kConfig, TouchedExperts<kConfig>{ctx}, plan.unit_blocks);
        u32 place = hw::block_idx(), taken = 0;  // places that CTAs have asked for, beyond the first one of each
        u32 loaded_steps = 0;
        TileTask task = order.first(place);
        tasks.publish(ctx, task, first_slot(plan, order));
        while (task.kind != TaskKind::End) {
            const TileTask loaded = task;
            const u32 steps = ctx.k_steps(loaded.kind);
            loaded_steps += steps;
            const u32 ask_at = steps - min_of(steps, kAskBefore), turn_at = steps - 1;
            if constexpr (kConfig.decodes_ahead()) decoded.begin(order.weight_number());
            for (u32 step = 0; step < steps; ++step, stage.advance()) {
                if (step == ask_at) taken = hw::atomic_add_relaxed_gpu(ctx.places_taken(), 1);
                if (step == turn_at) {
                    // Added only here: the loader waits for the answer where it uses it.
                    const u32 next = plan.workers + taken;
                    task = ctx.aborted() ? kEnd : order.next(next - place);
                    place = next;
                    tasks.publish(ctx, task, first_slot(plan, order));
                }
                // Before the stage is free, as it takes a while.
                if constexpr (kConfig.decodes_ahead()) decoded.wait(ctx, loaded, step);
                wait_barrier(ctx, Weights::empty(stage.slot), stage.empty_parity());
                const u8* weights = nullptr;
                if constexpr (kConfig.decodes_ahead()) weights = decoded.block(ctx, step);
                load_stage(ctx, loaded, step, stage.slot, scales.slot, weights, evict_first);
            }
            scales.advance();
            ctx.trace.lap(TraceKind::Load, loaded);
        }
        return loaded_steps;
    }

    // NOTES: the place is asked for as late as its way to memory and back allows. A whole tile earlier the last tiles
    // would go to CTAs that are not ready for them (9 % at 1024 tokens).
    static constexpr u32 kAskBefore = 3;  // stages before the end

    static constexpr u32 kBlockBytes = Weights::kBytes;

    // Of the tile that the order is at.
    static DM_DEVICE u32 first_slot(const DecodePlan& plan, const auto& order) {
        if constexpr (kConfig.decodes_ahead()) return plan.first_slot(order.weight_number());
        return 0;
    }

    // What a stage holds of the tile's weights; the first one comes with the scales of all. `decoded`: where they are if they
    // are decoded ahead.
    static DM_DEVICE void load_stage(const Context<kConfig>& ctx, const TileTask& task, u32 step, u32 stage,
                                     u32 scale_tile, const u8* decoded, bool evict_first) {
        const bool is_l1 = task.kind == TaskKind::L1;
        const u32 k_blocks = ctx.k_blocks(task.kind), scale_floats = scale_records(k_blocks) * kWeightScaleRecord;
        const u32 scale_bytes = step == 0 ? scale_floats * u32(sizeof(float)) : 0;
        // A narrow tile is a part of the rows of a weight tile, and the stage holds as many K blocks of it.
        const u32 parts = ctx.stage_k_blocks(task.kind), part_bytes = kBlockBytes / parts;
        const u64 tile = u64(task.expert) * ctx.weight_tiles(task.kind) + task.n_tile / parts;
        const u32 first_kb = step * parts, count = min_of(parts, k_blocks - first_kb);
        u64* full = ctx.barrier(Weights::full(stage));
        hw::mbarrier_arrive_expect_tx(full, count * part_bytes + scale_bytes);
        u8* to = ctx.template shared<Weights::kField, u8>() + stage * kBlockBytes;
        const u8* from = (is_l1 ? ctx.params.l1_weights : ctx.params.l2_weights) +
                         (tile * k_blocks + first_kb) * kBlockBytes + task.n_tile % parts * part_bytes;
        if constexpr (kConfig.decodes_ahead()) from = decoded;
        DM_UNROLL
        for (u32 i = 0; i < kConfig.l2_stage_k_blocks(); ++i)
            if (i >= count)
                continue;
            else if (evict_first)
                hw::bulk_load_evict_first(to + i * part_bytes, from + i * kBlockBytes, part_bytes, full);
            else
                hw::bulk_load(to + i * part_bytes, from + i * kBlockBytes, part_bytes, full);
        if (step == 0)
            hw::bulk_load(ctx.weight_scales(scale_tile),
                          (is_l1 ? ctx.params.l1_scales : ctx.params.l2_scales) + tile * scale_floats, scale_bytes,
                          full);
        if constexpr (kConfig.bias)  // the math warps load them into registers
            if (step == 0)
                hw::bulk_prefetch(ctx.tile_biases(task), ctx.tile_weight_rows(task.kind) * u32(sizeof(float)));
    }
};

template <MegaMoeConfig kConfig>
struct LoadARole {
    static DM_DEVICE void run(const Context<kConfig>& ctx) {
        DM_UNROLL
        for (u32 i = 0; i < u32(MapIndex::kCount); ++i) hw::prefetch_tensor_map(ctx.map(MapIndex(i)));
        TaskRing<kConfig> tasks;
        RingPosition<Context<kConfig>::kStages> stage;
        Finished finished;
        [[maybe_unused]] ChunksRead<kConfig> read;
        for (Turn next = turn(ctx, tasks);;) {
            const auto [task, entry, ready, weight_slot] = next;
            ctx.trace.lap(TraceKind::WaitTask, task);
            if constexpr (kConfig.decodes_ahead()) {
                if (task.kind == TaskKind::Decode) {
                    DecodeAheadRole<kConfig>::announce(ctx);
                    next = turn(ctx, tasks);
                    continue;
                }
                if (task.kind == TaskKind::End) read.finish(ctx, stage);
            }
            if (task.kind == TaskKind::End) return announce(ctx, finished, entry);
            if (!ready && !is_ready(ctx, task)) {
                if constexpr (kConfig.decodes_ahead()) read.finish(ctx, stage);
                announce(ctx, finished, entry);  // what this tile waits for may be the tile before it
                // After a failed wait the tile is computed from whatever is there and not stored.
                if (!wait_rows(ctx, task)) ctx.set_aborted();
            }
            ctx.trace.lap(TraceKind::WaitRows, task);
            // Rows, scales and requantised values were written by ordinary stores or other CTAs' bulk stores.
            hw::fence_proxy_async();
            const u32 steps = ctx.k_steps(task.kind), turn_at = steps - 1;
            if constexpr (kConfig.decodes_ahead()) read.begin(ctx, weight_slot, steps, stage);
            for (u32 step = 0; step < steps; ++step, stage.advance()) {
                if constexpr (kConfig.decodes_ahead())
                    if (step == turn_at) {  // the next tile may be published only when others have gone on
                        read.finish_before(ctx, stage, step);
                        announce(ctx, finished, entry);
                    }
                if (step == turn_at) next = turn(ctx, tasks);
                // This tile's weights may be decoded only when others have used what the tile before it has stored.
                if constexpr (kConfig.decodes_ahead())
                    if (step == Context<kConfig>::kStages) announce(ctx, finished, entry);
                wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
                // NOTES: not earlier. By now the math warps have used a stage of this tile, so they are past the
                // epilogue of the one before and its stores are under way since a while: the release hardly waits.
                if (step == Context<kConfig>::kStages) announce(ctx, finished, entry);
                load_stage(ctx, task, step, stage.slot);
                if constexpr (kConfig.decodes_ahead()) read.loaded(ctx, step);
            }
            announce(ctx, finished, entry);
            ctx.trace.lap(TraceKind::Load, task);
            finished.done = done_word(ctx, task);
        }
    }

private:
    // A tile, its entry in the ring, and whether its rows were there when the loader turned to it.
    struct Turn {
        TileTask task;
        RingPosition<kTaskDepth> entry;
        bool ready;
        u32 weight_slot;
    };
    static DM_DEVICE Turn turn(const Context<kConfig>& ctx, TaskRing<kConfig>& tasks) {
        const RingPosition<kTaskDepth> entry = tasks.position;
        u32 weight_slot = 0;
        const TileTask task = tasks.take(ctx, weight_slot);
        return {task, entry, is_ready(ctx, task), weight_slot};
    }

    // The tile before the current one, until other CTAs and the dispatch warps have been told that it is stored.
    struct Finished {
        u32* done = nullptr;
    };

    // The math warps take `next`, the entry after the finished tile's, when they have stored their part of it. The
    // loader tells the others in their place: a release waits until every store has reached its memory. What an aborted
    // CTA did not store it does not announce.
    static DM_DEVICE void announce(const Context<kConfig>& ctx, Finished& finished,
                                   const RingPosition<kTaskDepth>& next) {
        if (finished.done == nullptr) return;
        wait_barrier(ctx, ctx.barriers().task_empty(next.slot), next.full_parity());
        if (!ctx.aborted()) hw::add_release_gpu(finished.done, 1);
        finished.done = nullptr;
    }

    // L2 tiles are only told to a dispatch warp that needs their ring slot for another block.
    static DM_DEVICE u32* done_word(const Context<kConfig>& ctx, const TileTask& task) {
        if (task.kind == TaskKind::L1) return ctx.template block_counters<BufferField::L1Done>() + task.block;
        if (ctx.num_blocks() <= kConfig.ring_blocks()) return nullptr;
        return ctx.template block_counters<BufferField::L2Done>() + task.block;
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
    static DM_DEVICE bool is_ready(const Context<kConfig>& ctx, const TileTask& task) {
        if (task.kind == TaskKind::L1 && DirectRows<kConfig>::applies(ctx)) return true;
        return (task.kind == TaskKind::L1 || task.kind == TaskKind::L2) &&
               hw::load_acquire<hw::Scope::Gpu>(ready_word(ctx, task)) == ready_count(task);
    }
    static DM_DEVICE bool wait_rows(const Context<kConfig>& ctx, const TileTask& task) {
        const u32 count = ready_count(task);
        return wait_word<hw::Scope::Gpu>(ctx, task.kind == TaskKind::L1 ? WaitSite::RowsArrived : WaitSite::L1Done,
                                         task.block, ready_word(ctx, task), [count](u32 n) { return n == count; });
    }

    // What a stage holds of the tile's rows, and their scales.
    static DM_DEVICE void load_stage(const Context<kConfig>& ctx, const TileTask& task, u32 step, u32 stage) {
        constexpr u32 kStageBlocks = kConfig.l2_stage_k_blocks(), kBlockBytes = kConfig.block_m * kBlockK;
        const bool is_l1 = task.kind == TaskKind::L1;
        if (is_l1 && DirectRows<kConfig>::applies(ctx)) return load_staged_rows(ctx, task, step, stage);
        const u32 parts = ctx.stage_k_blocks(task.kind), k_blocks = ctx.k_blocks(task.kind), first_kb = step * parts;
        const u32 count = min_of(parts, k_blocks - first_kb), first_row = task.ring_slot * kConfig.block_m;
        const u32 rows = kConfig.loaded_rows(task.rows), scale_bytes = count * rows * u32(sizeof(float));
        const float* scales =
            (is_l1 ? ctx.template own<BufferField::L1PoolSf>() : ctx.template own<BufferField::L2PoolSf>()) +
            (u64(task.ring_slot) * k_blocks + first_kb) * kConfig.block_m;
        u64* full = ctx.barrier(ctx.barriers().full(stage));
        hw::mbarrier_arrive_expect_tx(full, parts * rows * kBlockK + scale_bytes);
        u8* tile = ctx.template shared<SmemField::A, u8>() + stage * kStageBlocks * kBlockBytes;
        if (parts > 1)
            hw::tma_load_3d(tile, ctx.map(MapIndex::L2Acts), 0, first_row, first_kb, full);  // zeros behind the last
        else
            load_rows(ctx, is_l1, first_kb * kBlockK, first_row, rows, tile, full);
        hw::bulk_load(ctx.template shared<SmemField::SfA, float>() + stage * kStageBlocks * kConfig.block_m, scales,
                      scale_bytes, full);
    }

    // A K block of every row; the scales are in shared memory already.
    static DM_DEVICE void load_staged_rows(const Context<kConfig>& ctx, const TileTask& task, u32 kb, u32 stage) {
        constexpr u32 kStageBytes = kConfig.l2_stage_k_blocks() * kConfig.block_m * kBlockK;
        u64* full = ctx.barrier(ctx.barriers().full(stage));
        hw::mbarrier_arrive_expect_tx(full, task.rows * kBlockK);
        u8* tile = ctx.template shared<SmemField::A, u8>() + stage * kStageBytes;
        DM_NO_UNROLL
        for (u32 row = 0; row < task.rows; ++row)
            hw::tma_load_2d(tile + row * kBlockK, ctx.map(MapIndex::StagedRow), kb * kBlockK,
                            DirectRows<kConfig>::token_of(ctx, task.block, row), full);
    }

    // A K block of rows: the whole block or boxes of it.
    static DM_DEVICE void load_rows(const Context<kConfig>& ctx, bool is_l1, u32 column, u32 first_row, u32 rows, u8* to,
                                    u64* full) {
        if (rows == kConfig.block_m) {
            hw::tma_load_2d(to, ctx.map(is_l1 ? MapIndex::L1Acts : MapIndex::L2Acts), column, first_row, full);
            return;
        }
        const TensorMap* map = ctx.map(is_l1 ? MapIndex::L1ActsBox : MapIndex::L2ActsBox);
        DM_NO_UNROLL
        for (u32 row = 0; row < rows; row += kConfig.box_rows())
            hw::tma_load_2d(to + row * kBlockK, map, column, first_row + row, full);
    }
};

}  // namespace deep_moe
