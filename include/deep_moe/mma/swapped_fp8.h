// The K blocks of a tile of 8 rows with FP8 weights: A of the wgmma are the weights, B the rows, both in shared memory.
#pragma once

#include "deep_moe/comm/direct_rows.h"
#include "deep_moe/epi/swapped.h"
#include "deep_moe/pipe/stages.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct SwappedFp8 {
    using Stage = RingPosition<Context<kConfig>::kStages>;
    using Tile = SwappedTile<kConfig>;
    using Piece = typename Tile::Piece;
    using Sum = typename Tile::Sum;

    // The tile's first stage has come.
    template <TaskKind kKind>
    static DM_DEVICE void multiply(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                                   const float* weight_scales, Sum& sum, Stage& stage) {
        constexpr bool kIsL1 = kKind == TaskKind::L1;
        // In L1 two groups of 64 weight rows of one K block, in L2 four K blocks of one group; the last stage may hold fewer.
        constexpr u32 kPieces = kIsL1 ? kL1Pieces : kStageBlocks, kBlocks = kIsL1 ? 1 : kStageBlocks;
        constexpr u32 kRest = (kIsL1 ? kConfig.l1_k_blocks() : kConfig.l2_k_blocks()) % kBlocks;
        const u32 whole = ctx.k_blocks(kKind) / kBlocks;
        const u32 first_group = Tile::template first_group<kKind>(thread.math_warp);
        Operands operands{
            swizzle128_descriptor(
                hw::uniform(hw::shared_address(ctx.template shared<SmemField::B, u8>() + first_group * kGroupBytes))),
            swizzle128_descriptor(hw::uniform(hw::shared_address(ctx.template shared<SmemField::A, u8>()))),
            {}};
        const bool direct = kIsL1 && DirectRows<kConfig>::applies(ctx);
        DM_UNROLL
        for (u32 i = 0; i < 2; ++i)
            if (direct)
                operands.row_scales[i] =
                    DirectRows<kConfig>::scales_of(ctx, task, thread.chunk(0).row(i));
        for (u32 step = 0; step < whole; ++step, weight_scales += kBlocks * kWeightScaleRecord) {
            multiply_stage<kKind, kPieces>(ctx, task, thread, operands, weight_scales, sum, stage,
                                           kRest == 0 && step + 1 == whole);
            if (direct) ++operands.row_scales[0], ++operands.row_scales[1];
        }
        if constexpr (kRest != 0)
            multiply_stage<kKind, kRest>(ctx, task, thread, operands, weight_scales, sum, stage, true);
    }

private:
    static constexpr u32 kL1Pieces = Tile::kL1Pieces;
    static constexpr u32 kStageBlocks = kConfig.l2_stage_k_blocks();  // K blocks of an L2 tile that a stage holds
    static constexpr u32 kGroupBytes = kWarpgroupRows * kBlockK, kRowBytes = kSwappedBlockM * kBlockK;

    // Where the operands of the ring's first stage are, and the scales of this thread's rows if they are not in the stages.
    struct Operands {
        u64 weights, rows;
        const float* row_scales[2];
    };

    // A stage that has come. Behind it the next one has too, unless this is the tile's last.
    template <TaskKind kKind, u32 kPieces>
    static DM_DEVICE void multiply_stage(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                                         const Operands& operands, const float* weight_scales,
                                         Sum& sum, Stage& stage, bool is_last) {
        constexpr bool kIsL1 = kKind == TaskKind::L1;
        constexpr u32 kBlocks = kIsL1 ? 1 : kPieces;
        constexpr u32 kNextWeights = kIsL1 ? kGroupBytes : kWeightBlockBytes / kStageBlocks;
        const u32 half = task.n_tile * kConfig.l2_block_n() / kScaleGroup % 2;  // of the weight tile, in L2
        const u32 slot = hw::uniform(stage.slot);
        const u64 weights = strided_descriptor(operands.weights, slot, kWeightBlockBytes);
        const u64 rows = strided_descriptor(operands.rows, slot, kStageBlocks * kRowBytes);
        Piece partial[kPieces];
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < 4; ++i) hw::wgmma_touch(partial[p][i]);
        hw::wgmma_fence();
        // The pieces in turns: a wgmma does not wait for the one before it, which adds to other registers.
        DM_UNROLL
        for (u32 k = 0; k < kBlockK; k += kMmaK)
            DM_UNROLL
            for (u32 p = 0; p < kPieces; ++p)
                hw::wgmma_m64k32_e4m3<kSwappedBlockM>(partial[p], advance_descriptor(weights, p * kNextWeights + k),
                                                      advance_descriptor(rows, (kIsL1 ? 0 : p * kRowBytes) + k),
                                                      k != 0);
        hw::wgmma_commit();
        float x_sf[kBlocks][Tile::kChunks][2], w_sf[kBlocks][2];
        const float* stage_scales =
            ctx.template shared<SmemField::SfA, float>() + stage.slot * kStageBlocks * kSwappedBlockM;
        const bool direct = kIsL1 && operands.row_scales[0] != nullptr;  // one K block a stage
        DM_UNROLL
        for (u32 b = 0; b < kBlocks; ++b)
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i) {
                x_sf[b][0][i] = hw::load_shared(direct ? operands.row_scales[i]
                                                    : stage_scales + b * kSwappedBlockM + thread.chunk(0).row(i));
                w_sf[b][i] = hw::load_shared(weight_scales + b * kWeightScaleRecord + (kIsL1 ? i : half));
            }
        Stage next = stage;
        next.advance();
        const bool next_full = is_full(ctx, next);
        hw::wgmma_wait<0>();
        release(ctx, stage);
        stage = next;
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            Tile::promote(sum[kIsL1 ? p : 0], partial[p], x_sf[kIsL1 ? 0 : p], w_sf[kIsL1 ? 0 : p]);
        if (!is_last && !next_full) wait_full(ctx, stage);
    }
};

}  // namespace deep_moe
