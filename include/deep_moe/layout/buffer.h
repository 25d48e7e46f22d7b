// The symmetric buffer: one list of fields, the same bytes on every rank.
//
// "Owner" is the rank whose experts a row is sent to; "source" is the rank the token belongs to.
// (remote) marks fields that other ranks write.
#pragma once

#include "deep_moe/layout/config.h"
#include "deep_moe/layout/fields.h"

namespace deep_moe {

constexpr u32 kBufferMagic = 0x454f4d44;  // "DMOE"

// First bytes of the buffer.
struct BufferHeader {
    u32 magic;
    u32 num_ranks;
    u64 layout_hash;
    u64 abort;              // (remote) 0, or an AbortRecord; never cleared by a kernel
    u32 epoch;              // number of launches that have ended; a launch works in epoch + 1
    i32 num_tokens;         // written by `stage`, in stream order
    u32 count_arrivals[2];  // CTAs that have added their routing counts; banks alternate by epoch parity
    u32 places_taken[2];    // of the tile order; banks likewise
    u32 blocks_used[2];     // row blocks, whose counters the next launch clears
};

enum class BufferField : u32 {
    Header,
    CountFlags,      // (remote) u64 [R]: source r's counts and lists are here (comm/arrivals.h)
    DoneFlags,       // (remote) u64 [R]: owner r has written all its combine slots
    SendCounts,      // u32 [2][E]: rows this rank sends to each expert; banks alternate by epoch parity
    RecvCounts,      // (remote) u32 [R][E_local]: rows that source r sends to each local expert
    SourceLists,     // (remote) u32 [R][T*K]: token * K + slot of source r's rows, ordered by local expert
    RowsArrived,     // u32 [2][blocks]: rows pulled into a row block; banks alternate by epoch parity
    L1Done,          // u32 [2][blocks]: L1 tiles of the block that are stored
    L2Done,          // u32 [2][blocks]: L2 tiles of the block that are stored
    DecodedChunks,   // u64 [slots]: which chunk a slot of DecodedWeights holds (sched/decode_plan.h)
    X,               // e4m3 [T][H]: staged activations
    XSf,             // f32 [T][H/128]
    TopkIdx,         // i32 [T][K]: -1 (or anything outside [0, E)) means no expert
    TopkWeights,     // f32 [T][K]
    L1Pool,          // e4m3 [ring rows][H]: pulled rows, input of L1
    L1PoolSf,        // f32 [ring rows / BM][H/128][BM], flat
    RowMeta,         // RowMeta [ring rows]
    L2Pool,          // e4m3 [ring rows][I padded to 128]: activated rows, input of L2
    L2PoolSf,        // f32 [ring rows / BM][I/128][BM], flat
    CombineSlots,    // (remote) bf16 [K][T][H]: one expert's output for one token
    DecodedWeights,  // e4m3 [slots][K blocks of a chunk][256][128]: as FP8 weights lie, K as activations
    kCount
};

// What the epilogues need to know of a pulled row.
struct alignas(16) RowMeta {
    u32 source_rank;
    u32 slot_row;  // slot * T + token: the row of CombineSlots it returns to
    float weight;  // top-k weight
    u32 reserved;
};

// Of the row that an entry (token * K + slot) of a rank becomes.
constexpr RowMeta row_meta(const MegaMoeConfig& c, u32 source_rank, u32 entry, float weight) {
    return {source_rank, entry % c.num_topk * c.max_tokens_per_rank + entry / c.num_topk, weight, 0};
}

constexpr FieldSpec buffer_field_spec(const MegaMoeConfig& c, BufferField field) {
    const u64 ranks = c.num_ranks, experts = c.num_experts, local = c.experts_per_rank();
    const u64 tokens = c.max_tokens_per_rank, topk = c.num_topk, ring = c.ring_rows, blocks = c.max_blocks();
    constexpr u32 kLine = 128, kPage = 1024;
    switch (field) {
        case BufferField::Header: return {"header", Dtype::U8, {sizeof(BufferHeader), 1, 1}, kPage};
        case BufferField::CountFlags: return {"count_flags", Dtype::U64, {ranks, 1, 1}, kLine};
        case BufferField::DoneFlags: return {"done_flags", Dtype::U64, {ranks, 1, 1}, kLine};
        case BufferField::SendCounts: return {"send_counts", Dtype::U32, {2, experts, 1}, kLine};
        case BufferField::RecvCounts: return {"recv_counts", Dtype::U32, {ranks, local, 1}, kLine};
        case BufferField::SourceLists: return {"source_lists", Dtype::U32, {ranks, tokens * topk, 1}, kLine};
        case BufferField::RowsArrived: return {"rows_arrived", Dtype::U32, {2, blocks, 1}, kLine};
        case BufferField::L1Done: return {"l1_done", Dtype::U32, {2, blocks, 1}, kLine};
        case BufferField::L2Done: return {"l2_done", Dtype::U32, {2, blocks, 1}, kLine};
        case BufferField::DecodedChunks: return {"decoded_chunks", Dtype::U64, {c.decoded_slots, 1, 1}, kLine};
        case BufferField::X: return {"x", Dtype::E4m3, {tokens, c.hidden, 1}, kPage};
        case BufferField::XSf: return {"x_sf", Dtype::F32, {tokens, c.l1_k_blocks(), 1}, kPage};
        case BufferField::TopkIdx: return {"topk_idx", Dtype::I32, {tokens, topk, 1}, kPage};
        case BufferField::TopkWeights: return {"topk_weights", Dtype::F32, {tokens, topk, 1}, kPage};
        case BufferField::L1Pool: return {"l1_pool", Dtype::E4m3, {ring, c.hidden, 1}, kPage};
        case BufferField::L1PoolSf: return {"l1_pool_sf", Dtype::F32, {c.l1_k_blocks(), ring, 1}, kPage};
        case BufferField::RowMeta: return {"row_meta", Dtype::U32, {ring, sizeof(RowMeta) / 4, 1}, kPage};
        case BufferField::L2Pool: return {"l2_pool", Dtype::E4m3, {ring, c.padded_intermediate(), 1}, kPage};
        case BufferField::L2PoolSf: return {"l2_pool_sf", Dtype::F32, {c.l2_k_blocks(), ring, 1}, kPage};
        case BufferField::CombineSlots: return {"combine_slots", Dtype::Bf16, {topk, tokens, c.hidden}, kPage};
        case BufferField::DecodedWeights:
            return {"decoded_weights", Dtype::E4m3, {c.decoded_slots, kChunkBlocks * kBlockN, kBlockK}, kPage};
        default: return {"", Dtype::U8, {0, 1, 1}, 1};
    }
}

constexpr u64 buffer_offset(const MegaMoeConfig& c, BufferField field) {
    return field_offset([&](u32 i) { return buffer_field_spec(c, BufferField(i)); }, u32(field),
                        u32(BufferField::kCount), 1u << 16);
}

constexpr u64 buffer_bytes(const MegaMoeConfig& c) { return buffer_offset(c, BufferField::kCount); }

// Equal on all ranks and all variants of a buffer, or the buffer is not shared correctly.
constexpr u64 buffer_layout_hash(const MegaMoeConfig& c) {
    LayoutHash hash;
    for (u32 i = 0; i < u32(BufferField::kCount); ++i)
        hash.add(buffer_field_spec(c, BufferField(i)), buffer_offset(c, BufferField(i)));
    hash.add(u64(c.num_experts));
    hash.add(u64(c.intermediate));
    hash.add(u64(c.mma_type));
    hash.add(u64(c.activation));
    hash.add(u64(c.bias));
    return hash.value;
}

// Why a launch gave up. Packed into BufferHeader::abort of every rank; the first one wins.
enum class AbortCode : u32 { None = 0, Timeout = 1, BoundMismatch = 2 };

// Where a wait on another CTA or rank stands. Python maps the numbers to words.
enum class WaitSite : u32 {
    None = 0,
    RouteCounts = 1,   // other CTAs of this rank, counting
    CountFlag = 2,     // index = source rank
    RingSlot = 3,      // index = row block
    RowsArrived = 4,   // index = row block
    L1Done = 5,        // index = row block
    DoneFlag = 6,      // index = owner rank
    Pipeline = 7,      // a barrier inside the CTA: a defect of the kernel
    DecodedChunk = 8,  // index = slot
    DecodedSlot = 9,   // index = slot
};

constexpr u64 abort_record(AbortCode code, WaitSite site, u32 rank, u32 index) {
    return (u64(code) << 56) | (u64(site) << 48) | (u64(rank & 0xffff) << 32) | index;
}

}  // namespace deep_moe
