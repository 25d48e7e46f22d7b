// Tiles with swapped operands: the weights are M of the wgmma, 64 rows at a time, and the rows of the block its N.
// What a thread holds of such a tile, its biases, and both epilogues.
//
// Value by value the arithmetic is that of the other tiles (mma/promote.h, epi/activation.h, epi/biases.h), and tensor
// cores give the same bits either way (bench/experiments/wgmma_widths.cu): with MXFP4 weights those of all heights, but
// not those of equal FP8 weights, as K has another order (layout/weights.h).
#pragma once

#include "deep_moe/epi/swiglu_quantise.h"

namespace deep_moe {

constexpr u32 kChunkRows = 8;  // rows of the block in a chunk of a wgmma's N

// A thread's part of 64 weight rows by the rows of the block, four numbers of every chunk of 8 rows: i / 2 is 0 for its
// first weight row (in L1 a gate row) and 1 for the one 8 further (the up row of the same channel), i % 2 the row.
template <MegaMoeConfig kConfig>
struct SwappedTile {
    static constexpr u32 kChunks = kConfig.block_m / kChunkRows;
    // An L1 tile has 256 weight rows, which the warpgroups share in groups of 64. Of an L2 tile a warpgroup has one group.
    static constexpr u32 kL1Pieces = kBlockN / kWarpgroupRows / kConfig.math_warpgroups();

    using Piece = float[kChunks * 4];
    using Sum = Piece[kL1Pieces];

    // The first group of 64 weight rows of the tile that this warp's warpgroup multiplies.
    template <TaskKind kKind>
    static DM_DEVICE u32 first_group(u32 math_warp) {
        if (kKind == TaskKind::L1) return math_warp / 4 * kL1Pieces;
        return kConfig.l2_block_n() == kWarpgroupRows ? 0 : math_warp / 4;
    }

    // One K block, in the order of mma/promote.h. x_sf: of the thread's two rows in each chunk; w_sf: of its weight rows.
    static DM_DEVICE void promote(Piece& sum, Piece& partial, const float (&x_sf)[kChunks][2], const float (&w_sf)[2]) {
        DM_UNROLL
        for (float& each : partial) hw::wgmma_touch(each);
        DM_UNROLL
        for (u32 i = 0; i < kChunks * 4; ++i)
            sum[i] = hw::fma(partial[i], hw::mul(x_sf[i / 4][i % 2], w_sf[i / 2 % 2]), sum[i]);
    }
};

struct SwappedThread {
    u32 math_warp;
    u32 channel_lane;  // its weight row of 8
    u32 quad_lane;

    DM_DEVICE explicit SwappedThread(u32 warp)
        : math_warp(warp), channel_lane(hw::lane_idx() / 4), quad_lane(hw::lane_idx() % 4) {}

    // The thread's two rows in a chunk.
    struct ChunkRows {
        u32 first;
        DM_DEVICE u32 row(u32 r) const { return first + r; }
    };
    DM_DEVICE ChunkRows chunk(u32 c) const { return {c * kChunkRows + quad_lane * 2}; }

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

// Meta data of the block's rows: a lane has that of the row with its number, and of the one kWarpSize further on.
template <MegaMoeConfig kConfig>
class SwappedRows {
public:
    DM_DEVICE SwappedRows(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread)
        : ctx_(ctx), task_(task), thread_(thread) {}

    // When they are there.
    DM_DEVICE void load() {
        const RowMeta* block = ctx_.template own<BufferField::RowMeta>() + task_.ring_slot * kConfig.block_m;
        const bool direct = DirectRows<kConfig>::applies_to_warp(ctx_);
        DM_UNROLL
        for (u32 i = 0; i < kHeld; ++i) {
            const u32 row = row_of_lane(i);
            meta_[i] = RowMeta{};
            if (row < task_.rows)
                meta_[i] = direct ? DirectRows<kConfig>::meta_of(ctx_, task_.block, row) : hw::load(block + row);
        }
    }

    // Of the i-th row of this lane. Zero if it is not there.
    DM_DEVICE float weight_of_lane(u32 i) const { return meta_[i].weight; }
    static DM_DEVICE u32 row_of_lane(u32 i) { return i * kWarpSize + hw::lane_idx(); }

    // Of a thread's row in a chunk.
    DM_DEVICE bool valid(u32 chunk, u32 r) const { return thread_.chunk(chunk).row(r) < task_.rows; }
    // Collective over the warp. Zero if it is not valid.
    DM_DEVICE float weight(u32 chunk, u32 r) const { return hw::shfl(held(chunk).weight, lane_of(chunk, r)); }
    // The row it returns to, or nullptr unless it is wanted. Collective over the warp.
    DM_DEVICE u16* slot(u32 chunk, u32 r, bool wanted) const {
        const u32 source = hw::shfl(held(chunk).source_rank, lane_of(chunk, r));
        const u32 row = hw::shfl(held(chunk).slot_row, lane_of(chunk, r));
        return wanted ? ctx_.template peer<BufferField::CombineSlots>(source) + row * u64(kConfig.hidden) : nullptr;
    }

    // Which lane has it, and as which of its rows.
    DM_DEVICE u32 lane_of(u32 chunk, u32 r) const { return thread_.chunk(chunk).row(r) % kWarpSize; }
    static constexpr u32 held_as(u32 chunk) { return chunk * kChunkRows / kWarpSize; }
    static constexpr u32 kHeld = ceil_div(kConfig.block_m, kWarpSize);

private:
    DM_DEVICE const RowMeta& held(u32 chunk) const { return meta_[held_as(chunk)]; }

    const Context<kConfig>& ctx_;
    const TileTask& task_;
    const SwappedThread& thread_;
    RowMeta meta_[kHeld];
};

// The biases of a thread's weight rows (epi/biases.h): few enough to be loaded before the tile's first stage has come.
template <MegaMoeConfig kConfig, TaskKind kKind>
struct SwappedBiases {
    using Tile = SwappedTile<kConfig>;
    static constexpr bool kIsL1 = kKind == TaskKind::L1;
    static constexpr u32 kPieces = kIsL1 ? Tile::kL1Pieces : 1;

    float bias[kPieces][2];  // of the first weight row and of the one 8 further

    DM_DEVICE SwappedBiases(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread) {
        if constexpr (kConfig.bias) load(ctx.tile_biases(task), thread);
    }

    // Once they are loaded.
    DM_DEVICE void add(const SwappedRows<kConfig>& rows, typename Tile::Sum& sum) const {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p)
            DM_UNROLL
            for (u32 i = 0; i < Tile::kChunks * 4; ++i) {
                float& value = sum[p][i];
                value = kIsL1 ? hw::add(value, bias[p][i / 2 % 2])
                              : hw::fma(rows.weight(i / 4, i % 2), bias[p][i / 2 % 2], value);
            }
    }

private:
    DM_DEVICE void load(const float* of_tile, const SwappedThread& thread) {
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 row = thread.weight_row(Tile::template first_group<kKind>(thread.math_warp) + p);
            const float* first = of_tile + (kIsL1 ? l1_channel_of(row) * 2 : l2_channel_of(row));
            bias[p][0] = hw::load(first);
            bias[p][1] = hw::load(first + (kIsL1 ? 1 : 2));  // up, or the channel of the second row
        }
    }
};

template <MegaMoeConfig kConfig>
struct SwappedSwigluQuantise {
    using Tile = SwappedTile<kConfig>;
    using Rows = SwappedRows<kConfig>;
    static constexpr u32 kChunks = Tile::kChunks, kPieces = Tile::kL1Pieces;
    static constexpr u32 kRows = kChunks * 2;  // of a thread, and its activated values of a piece

    // Collective over the math warps.
    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                              const Rows& rows, typename Tile::Sum& sum, MathBarrier& barrier) {
        const bool writes = !ctx.warp_aborted();
        float value[kPieces][kRows], amax[kRows];
        activate(sum, ctx.params, value, amax);
        // A lane divides for its rows, and not every thread for all of its own.
        float maxima[Rows::kHeld], inverse[Rows::kHeld];
        exchange_maxima(ctx, thread, amax, maxima, barrier);
        DM_UNROLL
        for (u32 i = 0; i < Rows::kHeld; ++i) {
            const GroupScale scale = weighted_group_scale(maxima[i], rows.weight_of_lane(i));
            inverse[i] = scale.inverse;
            const u32 row = Rows::row_of_lane(i);
            if (writes && thread.math_warp == 0 && row < task.rows)
                hw::store(ctx.template own<BufferField::L2PoolSf>() +
                              (u64(task.ring_slot) * kConfig.l2_k_blocks() + task.n_tile) * kConfig.block_m + row,
                          scale.sf);
        }
        DM_UNROLL
        for (u32 c = 0; c < kChunks; ++c) {
            if (c * kChunkRows >= task.rows) break;
            u32 codes[2];  // of each row, e4m3 of the pieces
            DM_UNROLL
            for (u32 r = 0; r < 2; ++r) {
                const u32 i = c * 2 + r;
                const float factor = hw::shfl(inverse[Rows::held_as(c)], rows.lane_of(c, r));
                codes[r] = hw::pack_e4m3x2(hw::mul(value[0][i], factor), hw::mul(value[kPieces - 1][i], factor));
            }
            const u32 taken = thread.takes_second_row();
            store(ctx, task, thread, thread.exchange(codes), thread.chunk(c).row(taken), writes && rows.valid(c, taken));
        }
    }

private:
    static DM_DEVICE void activate(typename Tile::Sum& sum, const MegaMoeParams& params, float (&value)[kPieces][kRows],
                                   float (&amax)[kRows]) {
        const float clamp = params.activation_clamp;
        DM_UNROLL
        for (u32 i = 0; i < kRows; ++i) {
            amax[i] = 0.0f;
            DM_UNROLL
            for (u32 p = 0; p < kPieces; ++p) {
                float &gate = sum[p][i / 2 * 4 + i % 2], &up = sum[p][i / 2 * 4 + 2 + i % 2];
                if (clamp <= kLargestFloat) clamp_pair(gate, up, clamp);
                value[p][i] = activated<kConfig.activation>(gate, up, params.activation_alpha);
                amax[i] = hw::max(amax[i], hw::abs(value[p][i]));
            }
        }
    }

    // From the maxima of a thread's channels to those of the tile's, of the rows of a lane (SwappedRows). Two banks: a warp
    // may be one tile ahead of a reader.
    static DM_DEVICE void exchange_maxima(const Context<kConfig>& ctx, const SwappedThread& thread, float (&amax)[kRows],
                                          float (&maxima)[Rows::kHeld], MathBarrier& barrier) {
        constexpr u32 kWarps = kConfig.math_warps();
        float* bank = ctx.template shared<SmemField::Amax, float>() + barrier.meetings % 2 * (kWarps * kConfig.block_m);
        store_maxima_of_warp(thread, amax, bank + thread.math_warp * kConfig.block_m);
        barrier.meet(ctx);
        // A lane joins the maxima of some warps, and with the lanes kApart apart those of all.
        constexpr u32 kApart = kConfig.block_m <= 16 ? kConfig.block_m : kWarpSize, kWarpsAtOnce = kWarpSize / kApart;
        const float* first = bank + hw::lane_idx() / kApart * kConfig.block_m;
        DM_UNROLL
        for (u32 i = 0; i < Rows::kHeld; ++i) {
            float& most = maxima[i];
            most = 0.0f;
            const u32 row = i * kWarpSize + hw::lane_idx() % kApart;
            DM_UNROLL
            for (u32 warp = 0; warp < kWarps; warp += kWarpsAtOnce)
                if (row < kConfig.block_m) most = hw::max(most, hw::load_shared(first + warp * kConfig.block_m + row));
            for (u32 mask = kApart; mask < kWarpSize; mask *= 2) most = hw::max(most, hw::shfl_xor(most, mask));
        }
    }

    // Over the lanes with other channels, which share the rows out: each keeps half of what it has and adds its partner's.
    template <u32 kHave = kRows, u32 kMask = kWarpSize / 2>
    static DM_DEVICE void store_maxima_of_warp(const SwappedThread& thread, float (&amax)[kRows], float* of_rows,
                                               u32 first = 0, bool first_is_copy = false) {
        if constexpr (kMask < 4) {
            DM_UNROLL
            for (u32 i = 0; i < kHave; ++i)
                if (i > 0 || !first_is_copy)
                    hw::store_shared(of_rows + thread.chunk((first + i) / 2).row((first + i) % 2), amax[i]);
        } else {
            constexpr u32 kKept = ceil_div(kHave, 2u);  // of an odd number both keep the middle one, and one of them stores it
            const bool upper = hw::lane_idx() & kMask;
            DM_UNROLL
            for (u32 i = 0; i < kKept; ++i) {
                const float low = amax[i], high = amax[kHave - kKept + i];
                amax[i] = hw::max(upper ? high : low, hw::shfl_xor(upper ? low : high, kMask));
            }
            if (upper) {
                first += kHave - kKept;
                first_is_copy = kHave % 2 != 0;
            }
            store_maxima_of_warp<kKept, kMask / 2>(thread, amax, of_rows, first, first_is_copy);
        }
    }

    // Byte p of the codes is the channel's of piece p.
    static DM_DEVICE void store(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                                const SwappedThread::ChannelPair& codes, u32 row, bool writes) {
        u8* group = ctx.template own<BufferField::L2Pool>() +
                    (task.ring_slot * kConfig.block_m + row) * u64(kConfig.padded_intermediate()) +
                    task.n_tile * kScaleGroup;
        DM_UNROLL
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 channel =
                l1_channel_of(thread.weight_row(Tile::template first_group<TaskKind::L1>(thread.math_warp) + p));
            const u32 both = (codes.first >> 8 * p & 0xff) | (codes.second >> 8 * p & 0xff) << 8;
            if (writes)
                hw::store(reinterpret_cast<u16*>(group + activation_byte_of(kConfig.mma_type, channel / 2 * 2)), u16(both));
        }
    }
};

template <MegaMoeConfig kConfig>
struct SwappedScatter {
    using Tile = SwappedTile<kConfig>;

    static DM_DEVICE void run(const Context<kConfig>& ctx, const TileTask& task, const SwappedThread& thread,
                              const SwappedRows<kConfig>& rows, const typename Tile::Piece& sum) {
        // Of four adjacent channels the thread has one of each two. The last weight tile may be wider than hidden.
        const u32 first_row = thread.weight_row(Tile::template first_group<TaskKind::L2>(thread.math_warp));
        const u32 column = l2_channel_of(task.n_tile * kConfig.l2_block_n() + first_row) / 4 * 4;
        const bool writes = !ctx.warp_aborted() && column < kConfig.hidden;
        const u32 taken = thread.takes_second_row();
        u16* to[Tile::kChunks];
        DM_UNROLL
        for (u32 c = 0; c < Tile::kChunks; ++c) to[c] = rows.slot(c, taken, writes && rows.valid(c, taken));
        DM_UNROLL
        for (u32 c = 0; c < Tile::kChunks; ++c) {
            if (c * kChunkRows >= task.rows) break;
            u32 values[2];  // of each row, bf16 of both weight rows, whose channels are 2 apart
            DM_UNROLL
            for (u32 r = 0; r < 2; ++r) values[r] = hw::pack_bf16x2(sum[c * 4 + r], sum[c * 4 + 2 + r]);
            const SwappedThread::ChannelPair pair = thread.exchange(values);
            const u64 low = hw::byte_permute(pair.first, pair.second, 0x5410),
                      high = hw::byte_permute(pair.first, pair.second, 0x7632);
            if (to[c] != nullptr) hw::store(reinterpret_cast<u64*>(to[c] + column), low | high << 32);
        }
    }
};

}  // namespace deep_moe
