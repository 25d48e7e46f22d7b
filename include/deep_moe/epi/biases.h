// The biases of an expert, added where a GEMM's sum of all K is complete. Of one channel, in fp32:
//
// L1: gate = gate + gate_bias, up = up + up_bias, before the clamp
// L2: fma(top-k weight, bias, sum): what L2 multiplies carries the weight already
//
// One expression for all tile heights: a token's bits do not depend on them. When they are loaded, LoadB has asked for
// them with the tile's first weights, so they come from the L2 cache.
#pragma once

#include "deep_moe/epi/accumulator.h"

namespace deep_moe {

struct alignas(16) FourFloats {
    float v[4];
};

// Of 64- and 128-row tiles. Nothing is loaded before the last wgmma: until then the registers are taken.
template <MegaMoeConfig kConfig, TileSplit kSplit>
struct TileBiases {
    static constexpr u32 kPieces = Accumulator<kSplit>::kPieces;

    // A thread's gate and up of 16 adjacent channels in each piece, two channels at a time.
    static DM_DEVICE void add_to_l1(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                                    Accumulator<kSplit>& acc) {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p) {
            const FourFloats* of_thread = at(ctx, task, tile.piece_column(p) + tile.quad_lane * 32);
            DM_UNROLL
            for (u32 j = 0; j < kPieceRegisters / 8; ++j) {
                const FourFloats bias = hw::load(of_thread + j);  // gate, up, gate, up
                DM_UNROLL
                for (u32 i = 0; i < 8; ++i) {
                    const u32 is_up = i / 4, channel = i % 2;
                    float& sum = acc.sum[p][j * 8 + i];
                    sum = hw::add(sum, bias.v[channel * 2 + is_up]);
                }
            }
        }
    }

    // A thread's 8 adjacent channels in each group of 32, four at a time.
    static DM_DEVICE void add_to_l2(const Context<kConfig>& ctx, const TileTask& task, const ThreadTile<kSplit>& tile,
                                    const TileRows& rows, Accumulator<kSplit>& acc) {
        const float weight[2] = {rows.weight(0), rows.weight(1)};
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 j = 0; j < kPieceRegisters / 8; ++j) {
                const u32 column = j / 2 * kL2GroupChannels + tile.quad_lane * 8 + j % 2 * 4;
                const FourFloats bias = hw::load(at(ctx, task, tile.piece_column(p) + column));
                DM_UNROLL
                for (u32 i = 0; i < 8; ++i) {
                    const u32 chunk = i / 4, row = i / 2 % 2;
                    float& sum = acc.sum[p][j * 8 + i];
                    sum = hw::fma(weight[row], bias.v[chunk * 2 + i % 2], sum);
                }
            }
    }

private:
    static DM_DEVICE const FourFloats* at(const Context<kConfig>& ctx, const TileTask& task, u32 first) {
        return reinterpret_cast<const FourFloats*>(ctx.tile_biases(task) + first);
    }
};

}  // namespace deep_moe
