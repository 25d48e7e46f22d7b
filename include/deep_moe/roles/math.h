// The math warpgroups: both GEMMs, their epilogues, and finally the combine.
#pragma once

#include "deep_moe/comm/combine.h"
#include "deep_moe/epi/scatter.h"
#include "deep_moe/epi/swiglu_quantise.h"
#include "deep_moe/pipe/stages.h"
#include "deep_moe/pipe/tasks.h"
#include "deep_moe/roles/decode_ahead.h"
#include "deep_moe/roles/swapped_math.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct MathRole {
    static constexpr u32 kStages = Context<kConfig>::kStages;
    using Stage = RingPosition<kStages>;

    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 math_warp) {
        TaskRing<kConfig> tasks;
        Stage stage;
        RingPosition<Context<kConfig>::kScaleTiles> scales;
        MathBarrier barrier;
        [[maybe_unused]] SwappedMath<kConfig> swapped;
        for (;;) {
            const TileTask task = tasks.take_warp(ctx);
            ctx.trace.lap(TraceKind::WaitTask, task);
            if constexpr (kConfig.decodes_ahead())
                if (task.kind == TaskKind::Decode) {
                    DecodeAheadRole<kConfig>::run(ctx, hw::warp_idx() - 4);
                    break;
                }
            if (task.kind == TaskKind::End) break;
            const float* weight_scales = ctx.weight_scales(scales.slot);
            if constexpr (kConfig.swaps_operands()) {
                swapped.run_tile(ctx, task, weight_scales, math_warp, stage, barrier);
            } else if (kConfig.tile_rows(task.rows) == kWarpgroupRows) {
                run_tile<TileSplit::Columns>(ctx, task, weight_scales, math_warp, stage, barrier);
            } else {
                run_tile<TileSplit::Rows>(ctx, task, weight_scales, math_warp, stage, barrier);
            }
            scales.advance();
        }
        finish(ctx, hw::warp_idx() - 4, barrier);  // math_warp would be kept all the time
    }

private:
    template <TileSplit kSplit>
    static DM_DEVICE void run_tile(const Context<kConfig>& ctx, const TileTask& task, const float* weight_scales,
                                   u32 math_warp, Stage& stage, MathBarrier& barrier) {
        const ThreadTile<kSplit> tile(math_warp);
        Accumulator<kSplit> acc;
        acc.clear();
        wait_full(ctx, stage);
        ctx.trace.lap(TraceKind::WaitFirstStage, task);
        const TileRows rows(ctx, task, tile);
        multiply(ctx, task, tile, weight_scales, acc, stage);
        ctx.trace.lap(TraceKind::Multiply, task);
        if (task.kind == TaskKind::L1)
            SwigluQuantise<kConfig, kSplit>::run(ctx, task, tile, rows, acc, barrier);
        else
            Scatter<kConfig, kSplit>::run(ctx, task, tile, rows, acc);
        ctx.trace.lap(TraceKind::Epilogue, task);
    }

    // The tile's first stage has come.
    template <TileSplit kSplit>
    static DM_DEVICE void multiply(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                                   const float* weight_scales, Accumulator<kSplit>& acc, Stage& stage) {
        constexpr u32 kPieces = Accumulator<kSplit>::kPieces;
        const bool is_l1 = task.kind == TaskKind::L1;
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const u8* smem_a = ctx.template shared<SmemField::A, u8>() + tile.a_row() * kBlockK;
        const u8* smem_b = ctx.template shared<SmemField::B, u8>() + tile.b_row() * kBlockK;
        const u64 first_a = swizzle128_descriptor(hw::uniform(hw::shared_address(smem_a)));
        const u64 first_b = swizzle128_descriptor(hw::uniform(hw::shared_address(smem_b)));
        for (u32 kb = 0;;) {
            // NOTES: few instructions may stand between the barrier and the first wgmma of a stage: 50 clocks there cost
            // 1 % of the layer. So the descriptors are one addition, and scales and the barrier of the next stage are
            // read while a wgmma runs. In the SASS no R2UR may come before a QGMMA (5 %): tests/compile looks.
            const u64 desc_a = strided_descriptor(first_a, stage.slot, kConfig.block_m * kBlockK);
            const u64 desc_b = strided_descriptor(first_b, stage.slot, kWeightBlockBytes);
            Stage next = stage;
            bool next_full = false;
            float x_sf[2], w_sf[2];
        DM_UNROLL
            for (u32 p = 0; p < kPieces; ++p) {
                float partial[kPieceRegisters];
                multiply_piece(partial, desc_a, advance_descriptor(desc_b, p * kPieceN * kBlockK));
                if (p == 0) load_scales(ctx, tile, stage, weight_scales, x_sf, w_sf);
                if (p + 1 == kPieces) {
                    next.advance();
                    next_full = is_full(ctx, next);
                }
                hw::wgmma_wait<0>();
                if (p + 1 == kPieces) {
                    release(ctx, stage);
                    stage = next;
                }
                promote_piece(acc.sum[p], partial, piece_scales(is_l1, tile.piece_column(p) / kPieceN, x_sf, w_sf));
            }
            if (++kb == k_blocks) break;
            weight_scales += kWeightScaleRecord;
            if (!next_full) wait_full(ctx, stage);
        }
    }

    template <TileSplit kSplit>
    static DM_DEVICE void load_scales(const Context<kConfig>& ctx, const ThreadTile<kSplit>& tile, const Stage& stage,
                                      const float* weight_scales, float (&x_sf)[2], float (&w_sf)[2]) {
        const float* sf_a = ctx.template shared<SmemField::SfA, float>() + stage.slot * kConfig.block_m;
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            x_sf[r] = hw::load_shared(sf_a + tile.row(r));
            w_sf[r] = hw::load_shared(weight_scales + r);
        }
    }

    // L1: even chunks are gate, odd ones up. L2: the 128 columns share one scale.
    static DM_DEVICE PieceScales piece_scales(bool is_l1, u32 half, const float (&x_sf)[2], const float (&w_sf)[2]) {
        const float even = is_l1 || half == 0 ? w_sf[0] : w_sf[1];
        const float odd = is_l1 || half == 1 ? w_sf[1] : w_sf[0];
        return {{hw::mul(x_sf[0], even), hw::mul(x_sf[1], even)}, {hw::mul(x_sf[0], odd), hw::mul(x_sf[1], odd)}};
    }

    // When all CTAs of all ranks have written their slots, this rank's are complete.
    static DM_DEVICE void finish(const Context<kConfig>& ctx, u32 math_warp, MathBarrier& barrier) {
        using Done = Arrivals<BufferField::DoneFlags>;
        barrier.meet(ctx);
        const bool first_cta = hw::block_idx() == 0;
        if (math_warp == 0 && !ctx.warp_aborted()) Done::arrive(ctx, hw::grid_dim());
        Combine<kConfig> combine(ctx, hw::block_idx() * kConfig.math_warps() + math_warp,
                                 hw::grid_dim() * kConfig.math_warps());
        const bool complete = Done::wait(ctx, WaitSite::DoneFlag, first_cta && math_warp == 0);
        ctx.trace.lap(TraceKind::WaitDone);
        // An abandoned launch may have all arrivals, and those behind it work in the same epoch.
        if (!complete || ctx.warp_aborted()) return;

        // This rank's CTAs have all arrived, so they have read the epoch.
        if (first_cta && math_warp == 0 && hw::lane_idx() == 0)
            hw::store(&ctx.template own<BufferField::Header>()->epoch, ctx.epoch());
        combine.run();
        ctx.trace.lap(TraceKind::Combine);
    }
};

}  // namespace deep_moe
