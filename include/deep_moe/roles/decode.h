// The decode warps: they bring MXFP4 weights from where LoadB puts them, packed, to where FP8 weights would lie in a
// stage, in LoadB's place. They go through K blocks as the loaders do, tile after tile: two warps decode one, 128 rows
// each, while the other two decode the next.
//
// NOTES: there is one of them on a scheduler, beside two math warps, and they are what such a kernel waits for. What stands
// before and behind the decoding is paid once for 128 rows (64 rows: 3 % slower). More registers, or the same work on six
// warps, change nothing; half of the instructions would make the kernel 8 % faster, and then it is shared memory that limits
// it (bench/NOTES.md).
#pragma once

#include "deep_moe/mma/mxfp4.h"
#include "deep_moe/mma/promote.h"
#include "deep_moe/pipe/stages.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct DecodeRole {
    using Packed = RingPosition<kPackedStages>;

    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 decode_warp) {
        Packed packed;
        Stage stage;
        u32 kb = 0;
        const auto advance = [&] { ++kb, packed.advance(), stage.advance(); };
        if (decode_warp >= kWarpsTogether) advance();
        for (;; advance(), advance()) {
            wait_barrier(ctx, ctx.barriers().packed_full(packed.slot), packed.full_parity());
            if (kb >= hw::load_shared(end_of_blocks(ctx))) break;
            const u32 lane = hw::lane_idx();
            const u32 first_piece = decode_warp % kWarpsTogether * kPieces;
            const u8* pieces = ctx.template shared<SmemField::Packed, u8>() + packed.slot * kPackedBytes +
                               first_piece * kMxfp4PieceBytes;
            u8* rows = ctx.template shared<SmemField::B, u8>() + stage.slot * kWeightBlockBytes +
                       first_piece * kWarpgroupRows * kBlockK +
                       decoded_byte_of(hw::keep(lane));  // not kept: registers are short
            const bool normal = all_normal(pieces, lane);
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            if (hw::all_lanes(normal))
                decode<true>(pieces, rows, lane);
            else
                decode<false>(pieces, rows, lane);
            hw::fence_proxy_async_shared();
            hw::sync_warp();
            if (hw::lane_idx() == 0) {
                hw::mbarrier_arrive(ctx.barrier(ctx.barriers().full(stage.slot)));
                hw::mbarrier_arrive(ctx.barrier(ctx.barriers().packed_empty(packed.slot)));
            }
        }
        ctx.trace.lap(TraceKind::Decode);
    }

    // LoadB, behind the last of so many K blocks: every warp waits for one that does not come.
    static DM_DEVICE void end(const Context<kConfig>& ctx, Packed next, u32 k_blocks) {
        hw::store_shared(end_of_blocks(ctx), k_blocks);
        for (u32 i = 0; i < kAtATime; ++i, next.advance()) {
            wait_barrier(ctx, ctx.barriers().packed_empty(next.slot), next.empty_parity());
            hw::mbarrier_arrive(ctx.barrier(ctx.barriers().packed_full(next.slot)));
        }
    }

private:
    using Stage = RingPosition<Context<kConfig>::kStages>;
    static constexpr u32 kAtATime = kDecodeWarps / kWarpsTogether;  // K blocks
    static_assert(kAtATime == 2);
    static constexpr u32 kPieces = kMxfp4Pieces / kWarpsTogether, kGroups = kWarpgroupRows / 16;
    static constexpr u32 kPackedBytes = weight_block_bytes(kConfig.mma_type);
    static_assert(kAtATime <= kPackedStages && kAtATime <= Context<kConfig>::kStages);

    static DM_DEVICE u32* end_of_blocks(const Context<kConfig>& ctx) {
        return ctx.template shared<SmemField::State, u32>() + 5;
    }

    static DM_DEVICE bool all_normal(const u8* pieces, u32 lane) {
        u32 exponents[kPieces * kGroups];  // all loads first
        DM_UNROLL
        for (u32 i = 0; i < kPieces * kGroups; ++i)
            exponents[i] = load_mxfp4_exponents(pieces + i / kGroups * kMxfp4PieceBytes, i % kGroups, lane);
        bool normal = true;
        DM_UNROLL
        for (const u32 each : exponents) normal &= mxfp4_all_normal(each);
        return normal;
    }

    // The codes of the next rows are loaded before these are stored.
    template <bool kAllNormal>
    static DM_DEVICE void decode(const u8* piece, u8* rows, u32 lane) {
        Mxfp4Codes codes = load_mxfp4(piece, 0, lane);
        DM_NO_UNROLL
        for (u32 p = 0; p < kPieces; ++p, piece += kMxfp4PieceBytes, rows += kWarpgroupRows * kBlockK)
            DM_UNROLL
            for (u32 i = 0; i < kGroups; ++i) {
                u32 a[kBlockK / kMmaK][4];
                decode_mxfp4(codes, kAllNormal, a);
                if (i + 1 < kGroups)
                    codes = load_mxfp4(piece, i + 1, lane);
                else if (p + 1 < kPieces)
                    codes = load_mxfp4(piece + kMxfp4PieceBytes, 0, lane);
                store_decoded(rows + i * 16 * kBlockK, lane, a);
            }
    }
};

}  // namespace deep_moe
