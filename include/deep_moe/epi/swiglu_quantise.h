// End of an L1 tile: biases, activation, top-k weight, requantisation to e4m3 with one scale per row and 128 channels,
// store.
//
// Chunk 2j of the accumulator holds 8 gate channels and chunk 2j + 1 the same 8 up channels, in the same thread, and a
// thread's channels of a piece are adjacent (layout/weights.h). The 256 columns of a tile are one group of 128
// channels; when the warpgroups split the columns they exchange their maxima through shared memory.
#pragma once

#include "deep_moe/epi/activation.h"
#include "deep_moe/epi/biases.h"
#include "deep_moe/pipe/math_barrier.h"

namespace deep_moe {

template <MegaMoeConfig kConfig, TileSplit kSplit>
struct SwigluQuantise {
    static constexpr u32 kPieces = Accumulator<kSplit>::kPieces;
    static constexpr u32 kValues = kPieceRegisters / 2;  // activated values of a thread in one piece

    // Collective over the math warps.
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                              const TileRows& rows, Accumulator<kSplit>& acc, MathBarrier& barrier) {
        const bool writes = !ctx.warp_aborted();
        float amax[2];
        if constexpr (kConfig.bias) TileBiases<kConfig, kSplit>::add_to_l1(ctx, task, tile, acc);
        if (ctx.params.activation_clamp <= kLargestFloat) clamp(acc, ctx.params.activation_clamp);
        activate(acc, ctx.params.activation_alpha, amax);
        if constexpr (ThreadTile<kSplit>::kByColumns) exchange(ctx, tile, amax, barrier);
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            const GroupScale scale = weighted_group_scale(amax[r], rows.weight(r));
            store_row(ctx, task, tile, acc, r, scale, writes && tile.valid(task, r));
        }
    }

private:
    // Where gate and up of the i-th activated value of a piece are.
    static constexpr u32 gate_of(u32 i) { return i / 4 * 8 + i % 4; }
    static constexpr u32 up_of(u32 i) { return gate_of(i) + 4; }

    static DM_DEVICE void clamp(Accumulator<kSplit>& acc, float limit) {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < kValues; ++i) clamp_pair(acc.sum[p][gate_of(i)], acc.sum[p][up_of(i)], limit);
    }

    // Replaces the accumulators by activated values (the first half of each piece) and finds the rows' maxima.
    static DM_DEVICE void activate(Accumulator<kSplit>& acc, float alpha, float (&amax)[2]) {
        amax[0] = amax[1] = 0.0f;
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < kValues; ++i) {
                const float value =
                    activated<kConfig.activation>(acc.sum[p][gate_of(i)], acc.sum[p][up_of(i)], alpha);
                const u32 row = i / 2 % 2;
                acc.sum[p][i] = value;
                amax[row] = hw::max(amax[row], hw::abs(value));
            }
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r)
            for (u32 mask = 1; mask <= 2; mask *= 2) amax[r] = hw::max(amax[r], hw::shfl_xor(amax[r], mask));
    }

    // Joins the maxima of the two warpgroups. Two banks: a warpgroup may be one tile ahead of a reader.
    static DM_DEVICE void exchange(const Context<kConfig>& ctx, const ThreadTile<kSplit>& tile, float (&amax)[2],
                                   MathBarrier& barrier) {
        float* bank = ctx.template shared<SmemField::Amax, float>() + barrier.meetings % 2 * (kFp8MathWarpgroups * 64);
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r)
            if (tile.quad_lane == 0) hw::store_shared(bank + tile.warpgroup * 64 + tile.row(r), amax[r]);
        barrier.meet(ctx);
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r)
            amax[r] = hw::max(amax[r], hw::load_shared(bank + (tile.warpgroup ^ 1) * 64 + tile.row(r)));
    }

    static DM_DEVICE void store_row(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                                    const Accumulator<kSplit>& acc, u32 r, const GroupScale& scale, bool writes) {
        const u32 pool_row = task.ring_slot * kConfig.block_m + tile.row(r);
        u8* row = ctx.template own<BufferField::L2Pool>() + pool_row * u64(kConfig.padded_intermediate()) +
                  task.n_tile * kScaleGroup;
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p) {
            Vec16 bytes;
            DM_UNROLL
            for (u32 j = 0; j < 4; ++j) {
                const float* v = acc.sum[p] + j * 8 + r * 2;
                bytes.w[j] = hw::pack_e4m3x2(hw::mul(v[0], scale.inverse), hw::mul(v[1], scale.inverse)) |
                             hw::pack_e4m3x2(hw::mul(v[4], scale.inverse), hw::mul(v[5], scale.inverse)) << 16;
            }
            const u32 channel = tile.piece_column(p) / 2 + tile.quad_lane * 16;
            if (writes) store_codes<kConfig.mma_type>(row, channel, bytes);
        }
        const bool writes_scale = !ThreadTile<kSplit>::kByColumns || tile.warpgroup == 0;
        if (writes && writes_scale && tile.quad_lane == 0) {
            float* sf = ctx.template own<BufferField::L2PoolSf>() +
                        (u64(task.ring_slot) * kConfig.l2_k_blocks() + task.n_tile) * kConfig.block_m;
            hw::store(sf + tile.row(r), scale.sf);
        }
    }
};

}  // namespace deep_moe
