// Tiles with swapped operands (epi/swapped.h) from their first stage to their epilogue. All warpgroups share a tile, but
// where an L2 tile is one group of 64 weight rows they take it in turns.
#pragma once

#include "deep_moe/mma/swapped_fp8.h"
#include "deep_moe/mma/swapped_mxfp4.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct SwappedMath {
    using Stage = RingPosition<Context<kConfig>::kStages>;
    using Tile = SwappedTile<kConfig>;

    u32 l2_tiles = 0;  // so far

    DM_DEVICE void run_tile(const Context<kConfig>& ctx, const TileTask& task, const float* weight_scales,
                            u32 math_warp, Stage& stage, MathBarrier& barrier) {
        if (task.kind == TaskKind::L1)
            run<TaskKind::L1>(ctx, task, weight_scales, math_warp, stage, barrier);
        else if (kSharesL2Tiles || l2_tiles++ % kConfig.math_warpgroups() == math_warp / 4)
            run<TaskKind::L2>(ctx, task, weight_scales, math_warp, stage, barrier);
        else
            skip(ctx, task, stage);
    }

private:
    static constexpr bool kSharesL2Tiles = kConfig.l2_block_n() > kWarpgroupRows;

    // The other warpgroup's tile.
    static DM_DEVICE void skip(const Context<kConfig>& ctx, const TileTask& task, Stage& stage) {
        for (u32 step = 0; step < ctx.k_steps(task.kind); ++step, stage.advance()) {
            wait_full(ctx, stage);  // or this warp could count twice in one phase of the stage's other barrier
            release(ctx, stage);
        }
    }

    template <TaskKind kKind>
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const float* weight_scales,
                              u32 math_warp, Stage& stage, MathBarrier& barrier) {
        const SwappedThread thread(math_warp);
        const SwappedBiases<kConfig, kKind> biases(ctx, task, thread);
        typename Tile::Sum sum = {};
        wait_full(ctx, stage);
        ctx.trace.lap(TraceKind::WaitFirstStage, task);
        // Used after the last stage: the latency is hidden behind the multiplication, unless registers are short.
        constexpr bool kRowsEarly = kConfig.block_m <= kWarpSize;
        SwappedRows<kConfig> rows(ctx, task, thread);
        if constexpr (kRowsEarly) rows.load();
        if constexpr (kConfig.has_mxfp4_weights())
            SwappedMxfp4<kConfig>::template multiply<kKind>(ctx, task, thread, weight_scales, sum[0], stage);
        else
            SwappedFp8<kConfig>::template multiply<kKind>(ctx, task, thread, weight_scales, sum, stage);
        ctx.trace.lap(TraceKind::Multiply, task);
        if constexpr (!kRowsEarly) rows.load();
        if constexpr (kConfig.bias) biases.add(rows, sum);
        if constexpr (kKind == TaskKind::L1)
            SwappedSwigluQuantise<kConfig>::run(ctx, task, thread, rows, sum, barrier);
        else
            SwappedScatter<kConfig>::run(ctx, task, thread, rows, sum[0]);
        ctx.trace.lap(TraceKind::Epilogue, task);
    }
};

}  // namespace deep_moe
