// How a kernel that decodes its weights ahead of their use shares out its CTAs, and where decoded weights lie.
//
// With many rows an expert's weights are needed by many row blocks: MXFP4 weights are then decoded once for each unit
// (task_order.h), by CTAs that do nothing else until the last tile, and all others multiply e4m3 weights as they would
// with an FP8 layer. In between is a ring of slots in device memory (BufferField::DecodedWeights), which should stay in
// the L2 cache. A slot holds a chunk: a few K blocks of a weight tile.
//
// Weight tiles, of one unit each, are numbered in the order of tiles, and decoders take them in turns. A tile has `depth`
// slots; those of the decoder's next tile are apart, so that it can begin before this one is read.
//
// No order of CTAs can dead-lock. A slot that is to be used again waits only for tiles that are being multiplied or
// have been: the other CTAs are at least as many as a weight tile has readers and take tiles in order, so all readers of
// the earliest one run. Before they wait, they tell what they have read and what they have stored (roles/load.h), and a
// decoder announces what it has stored (roles/decode_ahead.h).
#pragma once

#include "deep_moe/sched/task_order.h"

namespace deep_moe {

constexpr u32 kChunkBytes = kChunkBlocks * kBlockN * kBlockK;
// Chunks of a tile that a reader waits for, and tells of, at a time: each wait is two ways to memory.
constexpr u32 kReadTogether = 4;
constexpr u32 kLanes = 2;  // of a decoder, `depth` slots each, for tiles in turns
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

    DM_HOST_DEVICE constexpr bool is_decoder(u32 cta) const { return cta >= workers; }
    // Of a weight tile, whose chunk i uses slot i % depth of them.
    DM_HOST_DEVICE constexpr u32 first_slot(u32 number) const {
        return (number % decoders * kLanes + number / decoders % kLanes) * depth;
    }
};

// Of a launch with so many CTAs, in which `experts` experts have rows in so many row blocks.
DM_HOST_DEVICE constexpr DecodePlan decode_plan(const MegaMoeConfig& c, u32 ctas, u32 experts, u32 blocks) {
    if (!c.decodes_ahead()) return {0, ctas, c.unit_blocks, 0};
    const u32 unit_blocks = min_of(c.unit_blocks, max_of(1u, ctas - 1)),
              units = max_of(experts, ceil_div(blocks, unit_blocks));
    const u64 decode = u64(units) * kDecodeClocks, multiply = u64(blocks) * kMultiplyClocks;
    const u32 wanted = blocks == 0 ? 1 : u32((ctas * decode + decode + multiply - 1) / (decode + multiply));
    const u32 most = min_of(ctas - min_of(ctas - 1, unit_blocks), c.decoded_slots / kMinDecodedSlots);
    const u32 decoders = max_of(1u, min_of(wanted, most));
    return {decoders, ctas - decoders, unit_blocks, min_of(kMaxDepth, c.decoded_slots / (kLanes * decoders))};
}

constexpr u32 chunks_of(u32 k_blocks) { return ceil_div(k_blocks, kChunkBlocks); }

// The word of a slot: epoch, chunk of that launch, and below how many tiles have still to read it. It is written when the
// chunk is there, and each reader takes one from it.
DM_HOST_DEVICE constexpr u64 chunk_word(const MegaMoeConfig& c, u32 epoch, u32 tile, u32 chunk, u32 readers) {
    const u32 number = tile * chunks_of(max_of(c.l1_k_blocks(), c.l2_k_blocks())) + chunk;
    return u64(epoch) << 32 | (number & 0xffffff) << 8 | readers;
}
DM_HOST_DEVICE constexpr u32 readers_left(u64 word) { return u32(word) & 0xff; }
DM_HOST_DEVICE constexpr bool holds_chunk(u64 word, u64 without_readers) { return word >> 8 == without_readers >> 8; }

}  // namespace deep_moe
