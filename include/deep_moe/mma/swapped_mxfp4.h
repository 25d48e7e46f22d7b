// The K blocks of a tile with MXFP4 weights. Each warpgroup decodes its 64 weight rows of a stage to registers, which are
// A of the wgmma; B are the rows, in shared memory.
//
// NOTES: every instruction counts: with four warpgroups and 32 rows the loop of L1 has 140 for each warp and K block, of
// which decoding takes 73, and its time follows their number. Fragments of the next K block decoded between the wgmmas,
// warpgroups or pairs of them that issue in turns, or that begin one after the other: none was faster (bench/NOTES.md).
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
            if (DirectRows<kConfig>::applies_to_warp(ctx))
                return multiply_blocks<kKind>(ctx, thread, weight_scales, DirectScales(ctx, task, thread), sum, stage);
        multiply_blocks<kKind>(ctx, thread, weight_scales, StagedScales{}, sum, stage);
    }

private:
    // Stages of a round of the loop: what follows from the first one's number differs by a constant in the other.
    static constexpr u32 kTogether = stages_together(kConfig);
    static constexpr u32 kWeightBytes = weight_block_bytes(kConfig.mma_type), kRowBytes = kConfig.block_m * kBlockK;
    using Scales = float[Tile::kChunks][2];  // of the thread's rows

    // Barriers of a stage are barrier_bytes() of those of the first one behind this address.
    static DM_DEVICE u32 barriers_of(const Context<kConfig>& ctx, u32 slot) {
        return hw::shared_address(ctx.smem) + slot * u32(sizeof(u64));
    }
    static constexpr BarrierLayout kBarriers{Context<kConfig>::kStages};
    static constexpr u32 barrier_bytes(u32 index) {
        return smem_offset(kConfig, SmemField::Barriers) + index * u32(sizeof(u64));
    }

    // Of the first of them, what this thread reads (scales: of its rows, if they are in the stages), and the barriers.
    struct Round {
        const Vec16* codes;
        const u32* exponents;
        const float* scales;
        u64 rows;      // descriptor
        u32 barriers;  // as barriers_of
    };
    // Where they are. What does not depend on the stage is kept: the compiler would rather compute it again each time.
    class Rounds {
    public:
        DM_DEVICE Rounds(const Context<kConfig>& ctx, const SwappedThread& thread, u32 piece)
            : ctx_(ctx),
              rows_(swizzle128_descriptor(hw::uniform(hw::shared_address(ctx.template shared<SmemField::A, u8>())))) {
            const u32 warp = thread.math_warp % 4, first = piece * kMxfp4PieceBytes;
            codes_ = hw::keep(first + mxfp4_words_of(warp, hw::lane_idx()));
            exponents_ = hw::keep(first + mxfp4_exponents_of(warp, hw::lane_idx()));
            scales_ = hw::keep(thread.chunk(0).row(0));
        }
        DM_DEVICE Round at(u32 slot) const {
            const u8* weights = ctx_.template shared<SmemField::B, u8>() + slot * kWeightBytes;
            return {reinterpret_cast<const Vec16*>(weights + codes_),
                    reinterpret_cast<const u32*>(weights + exponents_),
                    ctx_.template shared<SmemField::SfA, float>() + slot * kConfig.block_m + scales_,
                    strided_descriptor(rows_, slot, kRowBytes), barriers_of(ctx_, slot)};
        }

    private:
        const Context<kConfig>& ctx_;
        u64 rows_;
        u32 codes_, exponents_, scales_;
    };

    // In the stages, beside the rows.
    struct StagedScales {
        template <u32 kAhead>
        DM_DEVICE void load(const Round& round, Scales& x_sf) const {
            DM_UNROLL
            for (u32 i = 0; i < Tile::kChunks * 2; ++i)
                x_sf[i / 2][i % 2] =
                    hw::load_shared(round.scales + kAhead * kConfig.block_m + i / 2 * kChunkRows + i % 2);
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
        template <u32 kAhead>
        DM_DEVICE void load(const Round&, Scales& x_sf) const {
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i) x_sf[0][i] = hw::load_shared(next[i] + kAhead);
        }
        DM_DEVICE void advance() { next[0] += kTogether, next[1] += kTogether; }
    };

    template <TaskKind kKind, typename RowScales>
    static DM_DEVICE void multiply_blocks(const Context<kConfig>& ctx, const SwappedThread& thread,
                                          const float* weight_scales, RowScales row_scales,
                                          typename Tile::Piece& sum, Stage& stage) {
        const u32 piece = Tile::template first_group<kKind>(thread.math_warp), k_blocks = ctx.k_blocks(kKind);
        // L1: the thread's first weight row is a gate row and the second an up row. L2: both are of one 128 rows.
        if (kKind == TaskKind::L2) weight_scales += piece / 2;
        const Rounds rounds(ctx, thread, piece);
        for (u32 kb = 0;;) {
            const Round round = rounds.at(hw::uniform(stage.slot));
            if constexpr (kTogether == 2)
                if (!multiply_block<kKind, 0, 1>(round, weight_scales, row_scales, sum, round.barriers, stage.full_parity()))
                    wait_full(ctx, Stage{stage.slot + 1, stage.phase});
            stage.template advance<kTogether>();
            const bool full = multiply_block<kKind, kTogether - 1, 0>(round, weight_scales, row_scales, sum,
                                                                      barriers_of(ctx, stage.slot), stage.full_parity());
            if ((kb += kTogether) == k_blocks) break;
            weight_scales += kTogether * kWeightScaleRecord;
            row_scales.advance();
            if (!full) wait_full(ctx, stage);
        }
    }

    // The K block of a stage that has come, kAhead of the round's first. Whether the next stage has: kNext of `barriers`.
    template <TaskKind kKind, u32 kAhead, u32 kNext, typename RowScales>
    static DM_DEVICE bool multiply_block(const Round& round, const float* weight_scales, const RowScales& row_scales,
                                         typename Tile::Piece& sum, u32 barriers, u32 next_parity) {
        constexpr bool kScalesEarly = Tile::kChunks <= 4;  // else registers are short
        constexpr u32 kVecs = kWeightBytes / sizeof(Vec16), kWords = kWeightBytes / sizeof(u32);
        u32 a[kBlockK / kMmaK][4];
        decode_mxfp4({{hw::load_shared(round.codes + kAhead * kVecs),
                       hw::load_shared(round.codes + kAhead * kVecs + kWarpSize)},
                      hw::load_shared(round.exponents + kAhead * kWords)},
                     a);
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
            hw::wgmma_m64k32_e4m3<kConfig.block_m>(
                partial, a[i], advance_descriptor(round.rows, kAhead * kRowBytes + i * kMmaK), i != 0);
        hw::wgmma_commit();
        float w_sf[2];
        DM_UNROLL
        for (u32 i = 0; i < 2; ++i)
            w_sf[i] = hw::load_shared(weight_scales + kAhead * kWeightScaleRecord + (kKind == TaskKind::L1 ? i : 0));
        Scales x_sf;
        if constexpr (kScalesEarly) row_scales.template load<kAhead>(round, x_sf);
        const bool next_full = hw::mbarrier_test_wait_at<barrier_bytes(kBarriers.full(kNext))>(barriers, next_parity);
        hw::wgmma_wait<0>();
        if constexpr (!kScalesEarly) row_scales.template load<kAhead>(round, x_sf);
        hw::sync_warp();
        if (hw::lane_idx() == 0) hw::mbarrier_arrive_at<barrier_bytes(kBarriers.empty(kAhead))>(round.barriers);
        Tile::promote(sum, partial, x_sf, w_sf);
        return next_full;
    }
};

}  // namespace deep_moe
