// The K blocks of a tile with MXFP4 weights. Each warpgroup decodes its 64 weight rows of a stage to registers, which are
// A of the wgmma; B are the rows, in shared memory.
//
// NOTES: every instruction counts: with four warpgroups and 32 rows the loop has 154 for each warp and K block, of which
// decoding takes 71, and its time follows their number. Fragments of the next K block decoded between the wgmmas, warpgroups or pairs of
// them that issue in turns, or that begin one after the other: none was faster (bench/NOTES.md).
#pragma once

#include "deep_moe/comm/direct_rows.h"
#include "deep_moe/epi/swapped.h"
#include "deep_moe/mma/mxfp4.h"
#include "deep_moe/pipe/stages.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct SwappedMxfp4 {
    using Stage = RingPosition<Context<kConfig>::kStages>;
    using Tile = SwappedTile<kConfig>;
    static_assert(Tile::kL1Pieces == 1 && kConfig.l2_stage_k_blocks() == 1);

    // The tile's first stage has come.
    template <TaskKind kKind>
    static DM_DEVICE void multiply(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                                   const float* weight_scales, typename Tile::Piece& sum, Stage& stage) {
        if constexpr (kKind == TaskKind::L1 && kConfig.has_direct_rows())
            if (DirectRows<kConfig>::applies(ctx))
                return multiply_blocks<kKind>(ctx, thread, weight_scales, DirectScales(ctx, task, thread), sum, stage);
        multiply_blocks<kKind>(ctx, thread, weight_scales, StagedScales(ctx, thread), sum, stage);
    }

private:
    using Scales = float[Tile::kChunks][2];  // of the thread's rows

    // In the stages, beside the rows.
    struct StagedScales {
        const float* first;

        DM_DEVICE StagedScales(const Context<kConfig>& ctx, const SwappedThread& thread)
            : first(ctx.template shared<SmemField::SfA, float>() + thread.chunk(0).row(0)) {}
        DM_DEVICE void load(const Stage& stage, Scales& x_sf) const {
            DM_UNROLL
            for (u32 i = 0; i < Tile::kChunks * 2; ++i)
                x_sf[i / 2][i % 2] =
                    hw::load_shared(first + stage.slot * kConfig.block_m + i / 2 * kChunkRows + i % 2);
        }
        DM_DEVICE void advance() {}
    };
    // Of rows that are not pulled: those of their tokens, one K block after the other.
    struct DirectScales {
        const float* next[2];

        DM_DEVICE DirectScales(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread) {
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i)
                next[i] = DirectRows<kConfig>::scales_of(ctx, task, thread.chunk(0).row(i));
        }
        DM_DEVICE void load(const Stage&, Scales& x_sf) const {
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i) x_sf[0][i] = hw::load_shared(next[i]);
        }
        DM_DEVICE void advance() { ++next[0], ++next[1]; }
    };

    template <TaskKind kKind, typename RowScales>
    static DM_DEVICE void multiply_blocks(const Context<kConfig>& ctx, const SwappedThread& thread,
                                          const float* weight_scales, RowScales row_scales,
                                          typename Tile::Piece& sum, Stage& stage) {
        constexpr bool kIsL1 = kKind == TaskKind::L1;
        constexpr bool kScalesEarly = Tile::kChunks <= 4;  // else registers are short
        const u32 piece = Tile::template first_group<kKind>(thread.math_warp), k_blocks = ctx.k_blocks(kKind);
        const u8* first_codes = ctx.template shared<SmemField::B, u8>() + piece * kMxfp4PieceBytes;
        const u64 first_rows =
            swizzle128_descriptor(hw::uniform(hw::shared_address(ctx.template shared<SmemField::A, u8>())));
        for (u32 kb = 0;;) {
            const u64 rows = strided_descriptor(first_rows, hw::uniform(stage.slot), kConfig.block_m * kBlockK);
            u32 a[kBlockK / kMmaK][4];
            decode_mxfp4(load_codes(thread, first_codes + stage.slot * weight_block_bytes(kConfig.mma_type)), a);
            typename Tile::Piece partial;
            DM_UNROLL
            for (float& each : partial) hw::wgmma_touch(each);
            DM_UNROLL
            for (u32 i = 0; i < kBlockK / kMmaK; ++i)
                DM_UNROLL
                for (u32 r = 0; r < 4; ++r) hw::wgmma_touch(a[i][r]);
            hw::wgmma_fence();
            DM_UNROLL
            for (u32 i = 0; i < kBlockK / kMmaK; ++i)
                hw::wgmma_m64k32_e4m3<kConfig.block_m>(partial, a[i], advance_descriptor(rows, i * kMmaK), i != 0);
            hw::wgmma_commit();
            // L1: the thread's first weight row is a gate row and the second an up row. L2: both are of one 128 rows.
            float w_sf[2];
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i) w_sf[i] = hw::load_shared(weight_scales + (kIsL1 ? i : piece / 2));
            Scales x_sf;
            if constexpr (kScalesEarly) row_scales.load(stage, x_sf);
            Stage next = stage;
            next.advance();
            const bool next_full = is_full(ctx, next);
            hw::wgmma_wait<0>();
            if constexpr (!kScalesEarly) row_scales.load(stage, x_sf);
            release(ctx, stage);
            stage = next;
            Tile::promote(sum, partial, x_sf, w_sf);
            if (++kb == k_blocks) break;
            weight_scales += kWeightScaleRecord;
            row_scales.advance();
            if (!next_full) wait_full(ctx, stage);
        }
    }

    static DM_DEVICE Mxfp4Codes load_codes(const SwappedThread& thread, const u8* piece) {
        const u32 warp = thread.math_warp % 4;
        const Vec16* words = reinterpret_cast<const Vec16*>(piece) + warp * 2 * kWarpSize + hw::lane_idx();
        const u32* exponents = reinterpret_cast<const u32*>(piece + kMxfp4CodeBytes);
        return {{hw::load_shared(words), hw::load_shared(words + kWarpSize)},
                hw::load_shared(exponents + (warp * 8 + thread.channel_lane) * 2 + thread.quad_lane / 2)};
    }
};

}  // namespace deep_moe
