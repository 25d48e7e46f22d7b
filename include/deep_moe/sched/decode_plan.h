// How a kernel that decodes its weights ahead of their use shares out its CTAs, and where decoded weights lie.
//
// With many rows an expert's weights are needed by many row blocks: MXFP4 weights are then decoded once for each unit
// (task_order.h), by CTAs that do nothing else until the last tile, and all others multiply e4m3 weights as they would
// with an FP8 layer. In between is a ring of slots in device memory (BufferField::DecodedWeights), which should stay in
// the L2 cache. A slot holds a chunk: a few K blocks of a weight tile.
//
// Weight tiles are decoded two at a time, chunk by chunk in turns, so that more CTAs have something to begin with.
// Pairs, of one unit, are numbered in the order of tiles, and decoders take them in turns. A pair has `depth`
// slots for each of its tiles; those of the decoder's next pair are apart, so that it can begin before this one is read.
//
// No order of CTAs can dead-lock. A slot that is to be used again waits only for tiles that are being multiplied or
// have been: the other CTAs are at least as many as a pair has readers and take tiles in order, so all readers of the
// earliest pair run. Before they wait, they tell what they have read and what they have stored (roles/load.h), and a
// decoder announces what it has stored (roles/decode.h).
#pragma once

#include "deep_moe/sched/task_order.h"

namespace deep_moe {

constexpr u32 kChunkBytes = kChunkBlocks * kBlockN * kBlockK;
// Chunks of a tile that a reader waits for, and tells of, at a time: each wait is two ways to memory.
constexpr u32 kReadTogether = 4;
constexpr u32 kLanes = 4;  // of a decoder, `depth` slots each: of two tiles of a pair, for two pairs
constexpr u32 kMinDepth = kMinDecodedSlots / kLanes, kMaxDepth = 16;
// A reader that waits for chunks has told of those two groups before, whose slots they may get.
static_assert(kMinDepth >= 2 * kReadTogether);

// Measured, clocks: of a decoder for a K block, which is what it takes to store 32 KB (an SM alone stores 64 KB in 2200);
// of a tile of 128 rows for one.
constexpr u32 kDecodeClocks = 1250, kMultiplyClocks = 1170;

struct DecodePlan {
    u32 decoders, workers;  // CTAs; the workers come first
    u32 unit_blocks;        // MegaMoeConfig::unit_blocks, or what so few CTAs allow
    u32 depth;              // slots of a lane
    u32 pair_tiles;         // 2, or with too few workers for that 1

    DM_HOST_DEVICE constexpr bool is_decoder(u32 cta) const { return cta >= workers; }
    // Of a pair's first tile; those of its second tile are `depth` further. Chunk i of a tile uses slot i % depth.
    DM_HOST_DEVICE constexpr u32 first_slot(WeightTile tile) const {
        return (tile.pair % decoders * kLanes + tile.pair / decoders % 2 * 2 + tile.half) * depth;
    }
};

// Of a launch with so many CTAs, in which `experts` experts have rows in so many row blocks.
DM_HOST_DEVICE constexpr DecodePlan decode_plan(const MegaMoeConfig& c, u32 ctas, u32 experts, u32 blocks) {
    if (!c.decodes_ahead()) return {0, ctas, c.unit_blocks, 0, 2};
    const u32 unit_blocks = min_of(c.unit_blocks, max_of(1u, (ctas - 1) / 2)),
              units = max_of(experts, ceil_div(blocks, unit_blocks));
    const u64 decode = u64(units) * kDecodeClocks, multiply = u64(blocks) * kMultiplyClocks;
    const u32 wanted = blocks == 0 ? 1 : u32((ctas * decode + decode + multiply - 1) / (decode + multiply));
    const u32 most = min_of(ctas - min_of(ctas - 1, 2 * unit_blocks), c.decoded_slots / kMinDecodedSlots);
    const u32 decoders = max_of(1u, min_of(wanted, most));
    return {decoders, ctas - decoders, unit_blocks, min_of(kMaxDepth, c.decoded_slots / (kLanes * decoders)),
            ctas - decoders >= 2 * unit_blocks ? 2u : 1u};
}

constexpr u32 chunks_of(u32 k_blocks) { return ceil_div(k_blocks, kChunkBlocks); }

// The word of a slot: epoch, chunk of that launch, and below how many tiles have still to read it. It is written when the
// chunk is there, and each reader takes one from it.
DM_HOST_DEVICE constexpr u64 chunk_word(const MegaMoeConfig& c, u32 epoch, u32 pair, u32 chunk, u32 readers) {
    const u32 number = pair * chunks_of(max_of(c.l1_k_blocks(), c.l2_k_blocks())) + chunk;
    return u64(epoch) << 32 | (number & 0xffffff) << 8 | readers;
}
DM_HOST_DEVICE constexpr u32 readers_left(u64 word) { return u32(word) & 0xff; }
DM_HOST_DEVICE constexpr bool holds_chunk(u64 word, u64 without_readers) { return word >> 8 == without_readers >> 8; }

}  // namespace deep_moe
