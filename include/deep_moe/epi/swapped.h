// Tiles with swapped operands: the weights are M of the wgmma, 64 rows at a time, and the 8 rows of the block its N.
// What a thread holds of such a tile, its biases, and both epilogues.
//
// Value by value the arithmetic is that of the other tiles (mma/promote.h, epi/activation.h, epi/biases.h), and tensor
// cores give the same bits either way (bench/experiments/wgmma_widths.cu).
#pragma once

#include "deep_moe/epi/swiglu_quantise.h"

namespace deep_moe {

// A thread's part of 64 weight rows by 8 rows of the block: i / 2 is 0 for its first weight row (in L1 a gate row) and 1
// for the one 8 further (the up row of the same channel), i % 2 the row.
using SwappedPiece = float[4];

// An L1 tile has 256 weight rows, and each warpgroup two groups of 64. An L2 tile is one group, of one warpgroup.
constexpr u32 kL1Pieces = kBlockN / kWarpgroupRows / kNumMathWarpgroups;

struct SwappedThread {
    u32 math_warp;
    u32 channel_lane;  // its weight row of 8
    u32 quad_lane;

    DM_DEVICE explicit SwappedThread(u32 warp)
        : math_warp(warp), channel_lane(hw::lane_idx() / 4), quad_lane(hw::lane_idx() % 4) {}

    DM_DEVICE u32 row(u32 r) const { return quad_lane * 2 + r; }
    // The first weight row of this thread in a group of 64 rows of the tile.
    DM_DEVICE u32 weight_row(u32 group) const { return group * kWarpgroupRows + math_warp % 4 * 16 + channel_lane; }

    // Threads four lanes apart hold adjacent channels of the same two rows. They exchange half of what they have, so that
    // the first has both channels of the first row and the second those of the second row.
    DM_DEVICE bool takes_second_row() const { return channel_lane % 2 != 0; }
    struct ChannelPair {
        u32 first, second;
    };
    DM_DEVICE ChannelPair exchange(const u32 (&of_row)[2]) const {
        constexpr u32 kPartner = 4;
        const u32 got = hw::shfl_xor(takes_second_row() ? of_row[0] : of_row[1], kPartner);
        return takes_second_row() ? ChannelPair{got, of_row[1]} : ChannelPair{of_row[0], got};
    }
};

// The biases of a thread's weight rows (epi/biases.h): few enough to be loaded before the tile's first stage has come.
template <MegaMoeConfig kConfig, TaskKind kKind>
struct SwappedBiases {
    static constexpr bool kIsL1 = kKind == TaskKind::L1;
    static constexpr u32 kPieces = kIsL1 ? kL1Pieces : 1;

    float bias[kPieces][2];  // of the first weight row and of the one 8 further

    DM_DEVICE SwappedBiases(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread) {
        if constexpr (kConfig.bias) load(ctx.tile_biases(task), thread);
    }

    // Once they are loaded.
    DM_DEVICE void add(const TileRows& rows, SwappedPiece (&sum)[kL1Pieces]) const {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < 4; ++i)
                sum[p][i] = kIsL1 ? hw::add(sum[p][i], bias[p][i / 2])
                                  : hw::fma(rows.meta[i % 2].weight, bias[p][i / 2], sum[p][i]);
    }

private:
    DM_DEVICE void load(const float* of_tile, const SwappedThread& thread) {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 row = thread.weight_row(kIsL1 ? thread.math_warp / 4 * kL1Pieces + p : 0);
            const float* first = of_tile + (kIsL1 ? l1_channel_of(row) * 2 : l2_channel_of(row));
            bias[p][0] = hw::load(first);
            bias[p][1] = hw::load(first + (kIsL1 ? 1 : 2));  // up, or the channel of the second row
        }
    }
};

template <MegaMoeConfig kConfig>
struct SwappedSwigluQuantise {
    // Collective over the math warps.
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                              const TileRows& rows, SwappedPiece (&sum)[kL1Pieces], MathBarrier& barrier) {
        const bool writes = !ctx.warp_aborted();
        float value[kL1Pieces][2], amax[2];
        activate(sum, ctx.params, value, amax);
        exchange_maxima(ctx, thread, amax, barrier);
        u32 codes[2];  // of each row, e4m3 of both pieces
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            const GroupScale scale = weighted_group_scale(amax[r], rows.meta[r].weight);
            codes[r] = hw::pack_e4m3x2(hw::mul(value[0][r], scale.inverse), hw::mul(value[1][r], scale.inverse));
            if (writes && rows.valid[r] && thread.math_warp == 0 && thread.channel_lane == 0)
                hw::store(ctx.template own<BufferField::L2PoolSf>() +
                              (u64(task.ring_slot) * kConfig.l2_k_blocks() + task.n_tile) * kSwappedBlockM +
                              thread.row(r),
                          scale.sf);
        }
        const bool second = thread.takes_second_row();
        store(ctx, task, thread, thread.exchange(codes), thread.row(second), writes && (second ? rows.valid[1] : rows.valid[0]));
    }

private:
    static DM_DEVICE void activate(SwappedPiece (&sum)[kL1Pieces], const MegaMoeParams& params,
                                   float (&value)[kL1Pieces][2], float (&amax)[2]) {
        const float clamp = params.activation_clamp;
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            amax[r] = 0.0f;
            DM_UNROLL
            for (u32 p = 0; p < kL1Pieces; ++p) {
                float &gate = sum[p][r], &up = sum[p][2 + r];
                if (clamp <= kLargestFloat) clamp_pair(gate, up, clamp);
                value[p][r] = activated<kConfig.activation>(gate, up, params.activation_alpha);
                amax[r] = hw::max(amax[r], hw::abs(value[p][r]));
            }
            for (u32 mask = 4; mask < kWarpSize; mask *= 2) amax[r] = hw::max(amax[r], hw::shfl_xor(amax[r], mask));
        }
    }

    // Joins the maxima of the math warps. Two banks: a warp may be one tile ahead of a reader.
    static DM_DEVICE void exchange_maxima(const Context<kConfig>& ctx, const SwappedThread& thread, float (&amax)[2],
                                          MathBarrier& barrier) {
        float* bank = ctx.template shared<SmemField::Amax, float>() +
                      barrier.meetings % 2 * (kNumMathWarps * kSwappedBlockM);
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r)
            if (thread.channel_lane == 0)
                hw::store_shared(bank + thread.math_warp * kSwappedBlockM + thread.row(r), amax[r]);
        barrier.meet(ctx);
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r)
            for (u32 warp = 0; warp < kNumMathWarps; ++warp)
                amax[r] = hw::max(amax[r], hw::load_shared(bank + warp * kSwappedBlockM + thread.row(r)));
    }

    // Byte p of the codes is the channel's of piece p.
    static DM_DEVICE void store(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                                const SwappedThread::ChannelPair& codes, u32 row, bool writes) {
        u8* group = ctx.template own<BufferField::L2Pool>() +
                    (task.ring_slot * kSwappedBlockM + row) * u64(kConfig.padded_intermediate()) +
                    task.n_tile * kScaleGroup;
        DM_UNROLL
        for (u32 p = 0; p < kL1Pieces; ++p) {
            const u32 channel = l1_channel_of(thread.weight_row(thread.math_warp / 4 * kL1Pieces + p));
            const u32 both = (codes.first >> 8 * p & 0xff) | (codes.second >> 8 * p & 0xff) << 8;
            if (writes) hw::store(reinterpret_cast<u16*>(group + channel / 2 * 2), u16(both));
        }
    }
};

template <MegaMoeConfig kConfig>
struct SwappedScatter {
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                              const TileRows& rows, const SwappedPiece& sum) {
        const bool writes = !ctx.warp_aborted();
        u16* row[2];
        u32 values[2];  // of each row, bf16 of both weight rows, whose channels are 2 apart
        DM_UNROLL
        for (u32 r = 0; r < 2; ++r) {
            row[r] = slot_row(ctx, rows, r);
            values[r] = hw::pack_bf16x2(sum[r], sum[2 + r]);
        }
        const SwappedThread::ChannelPair pair = thread.exchange(values);
        u16* to = thread.takes_second_row() ? row[1] : row[0];
        // Of four adjacent channels the thread had one of each two.
        const u32 column = l2_channel_of(task.n_tile * kConfig.l2_block_n() + thread.weight_row(0)) / 4 * 4;
        if (!writes || to == nullptr) return;
        const u64 low = hw::byte_permute(pair.first, pair.second, 0x5410),
                  high = hw::byte_permute(pair.first, pair.second, 0x7632);
        hw::store(reinterpret_cast<u64*>(to + column), low | high << 32);
    }

private:
    static DM_DEVICE u16* slot_row(const Context<kConfig>& ctx, const TileRows& rows, u32 r) {
        if (!rows.valid[r]) return nullptr;
        return ctx.template peer<BufferField::CombineSlots>(rows.meta[r].source_rank) +
               rows.meta[r].slot_row * u64(kConfig.hidden);
    }
};

}  // namespace deep_moe
