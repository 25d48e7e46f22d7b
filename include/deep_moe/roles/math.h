// The math warpgroups: both GEMMs, their epilogues, and finally the combine.
#pragma once

#include "deep_moe/comm/combine.h"
#include "deep_moe/epi/scatter.h"
#include "deep_moe/epi/swiglu_quantise.h"
#include "deep_moe/pipe/tasks.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct MathRole {
    using Stage = RingPosition<Context<kConfig>::kStages>;

    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 math_warp) {
        const ThreadTile<kConfig> tile(math_warp);
        TaskRing<kConfig> tasks;
        Stage stage;
        u32 exchanges = 0;
        for (;;) {
            const TileTask task = tasks.take_warp(ctx);
            if (task.kind == TaskKind::End) break;
            Accumulator<kConfig> acc;
            acc.clear();
            multiply(ctx, task, tile, acc, stage);
            u32* done;
            if (task.kind == TaskKind::L1) {
                SwigluQuantise<kConfig>::run(ctx, task, tile, acc, exchanges);
                done = ctx.template block_counters<BufferField::L1Done>();
            } else {
                Scatter<kConfig>::run(ctx, task, tile, acc, !ctx.warp_aborted());
                done = ctx.template block_counters<BufferField::L2Done>();
            }
            hw::sync_warp();
            if (hw::lane_idx() == 0) hw::add_release_gpu(done + task.block, 1);
        }
        finish(ctx, hw::block_idx() * kNumMathWarps + math_warp);
    }

private:
    static DM_DEVICE void multiply(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kConfig>& tile,
                                   Accumulator<kConfig>& acc, Stage& stage) {
        constexpr u32 kPieces = Accumulator<kConfig>::kPieces;
        const bool is_l1 = task.kind == TaskKind::L1;
        const u32 k_blocks = ctx.k_blocks(task.kind);
        const u64 desc_a0 =
            swizzle128_descriptor(hw::shared_address(ctx.template shared<SmemField::A, u8>() + tile.a_row() * kBlockK));
        const u64 desc_b0 =
            swizzle128_descriptor(hw::shared_address(ctx.template shared<SmemField::B, u8>() + tile.b_row() * kBlockK));
        for (u32 kb = 0; kb < k_blocks; ++kb, stage.advance()) {
            wait_barrier(ctx, ctx.barriers().full(stage.slot), stage.full_parity());
            const float* sf_a = ctx.template shared<SmemField::SfA, float>() + stage.slot * kConfig.block_m;
            const float* sf_b = ctx.template shared<SmemField::SfB, float>() + stage.slot * kWeightScaleRecord;
            const float x_sf[2] = {hw::load_shared(sf_a + tile.row(0)), hw::load_shared(sf_a + tile.row(1))};
            const float w_sf[2] = {hw::load_shared(sf_b), hw::load_shared(sf_b + 1)};
            const u64 desc_a = advance_descriptor(desc_a0, stage.slot * kConfig.block_m * kBlockK);
            const u64 desc_b = advance_descriptor(desc_b0, stage.slot * kBlockN * kBlockK);
        DM_UNROLL
            for (u32 p = 0; p < kPieces; ++p) {
                float partial[kPieceRegisters];
                multiply_piece(partial, desc_a, advance_descriptor(desc_b, p * kPieceN * kBlockK));
                hw::wgmma_wait<0>();
                if (p + 1 == kPieces) release(ctx, stage);
                promote_piece(acc.sum[p], partial, piece_scales(is_l1, tile.piece_column(p) / kPieceN, x_sf, w_sf));
            }
        }
    }

    // This warp has read the stage for the last time.
    static DM_DEVICE void release(const Context<kConfig>& ctx, const Stage& stage) {
        hw::sync_warp();
        if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(ctx.barriers().empty(stage.slot)));
    }

    // L1: even chunks are gate, odd ones up. L2: the 128 columns share one scale.
    static DM_DEVICE PieceScales piece_scales(bool is_l1, u32 half, const float (&x_sf)[2], const float (&w_sf)[2]) {
        const float even = is_l1 || half == 0 ? w_sf[0] : w_sf[1];
        const float odd = is_l1 || half == 1 ? w_sf[1] : w_sf[0];
        return {{hw::mul(x_sf[0], even), hw::mul(x_sf[1], even)}, {hw::mul(x_sf[0], odd), hw::mul(x_sf[1], odd)}};
    }

    // The last warp of the rank to finish its tiles tells all ranks; when all ranks have, the slots are complete.
    static DM_DEVICE void finish(const Context<kConfig>& ctx, u32 warp) {
        BufferHeader* header = ctx.template own<BufferField::Header>();
        const u32 num_warps = hw::grid_dim() * kNumMathWarps, epoch = ctx.epoch();
        if (last_to_arrive(&header->tail_arrivals, num_warps) && check_abort(ctx) == 0) {
            DM_NO_UNROLL
            for (u32 rank = hw::lane_idx(); rank < kConfig.num_ranks; rank += kWarpSize)
                hw::store_release_sys(ctx.template peer<BufferField::DoneFlags>(rank) + ctx.params.rank, epoch);
        }

        bool ok = true;
        DM_NO_UNROLL
        for (u32 rank = hw::lane_idx(); rank < kConfig.num_ranks; rank += kWarpSize)
            ok = ok && wait_word<hw::Scope::Sys>(ctx, WaitSite::DoneFlag, rank,
                                                 ctx.template own<BufferField::DoneFlags>() + rank,
                                                 [epoch](u32 seen) { return i32(seen - epoch) >= 0; });
        hw::sync_warp();
        if (hw::all_lanes(ok)) Combine<kConfig>::run(ctx, warp, num_warps);

        if (last_to_arrive(&header->exit_arrivals, num_warps) && hw::lane_idx() == 0)
            hw::store(&header->epoch, epoch);
    }

    // Warp-collective: true for the last of `expected` warps, which also clears the counter.
    static DM_DEVICE bool last_to_arrive(u32* arrivals, u32 expected) {
        hw::sync_warp();
        u32 before = 0;
        if (hw::lane_idx() == 0) before = hw::atomic_add_acq_rel<hw::Scope::Sys>(arrivals, 1);
        const bool last = hw::shfl(before, 0) == expected - 1;
        if (last && hw::lane_idx() == 0) hw::store(arrivals, 0u);
        hw::sync_warp();
        return last;
    }
};

}  // namespace deep_moe
