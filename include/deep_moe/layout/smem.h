// Shared memory of one CTA: one list of fields, and the number of pipeline stages that fit.
#pragma once

#include "deep_moe/layout/config.h"
#include "deep_moe/layout/fields.h"
#include "deep_moe/layout/weights.h"

namespace deep_moe {

constexpr u32 kMaxSmemBytes = 232448;  // 227 KiB: the most a block may use on SM90 and SM100
constexpr u32 kTaskDepth = 4;          // tile entries in flight between the scheduler and its readers
constexpr u32 kMaxRowBuffers = 2;      // rows in flight per pulling warp
constexpr u32 kMaxStages = 12;
constexpr u32 kPackedStages = 3;      // K blocks of packed weights, for decode warps (roles/decode.h),
constexpr u32 kWarpsTogether = 2;     // of which so many decode one
constexpr u32 kSlotsGiven = 3;        // of decoded weights, ahead of the chunks that have been announced
constexpr u32 kMaxLoneEntries = 256;  // that one rank alone routes in every CTA

enum class SmemField : u32 {
    A,          // [stages][K blocks][BM][128] activations, 128-byte swizzle
    B,          // [stages][bytes of a weight block] weights as in layout/weights.h
    Packed,     // [kPackedStages][bytes of a weight block] what decode warps decode, as in layout/weights.h
    SfA,        // f32 [stages][K blocks][BM]
    SfB,        // f32 [tiles][K blocks][2]: the weight scale records of the tiles under way
    RowBuffer,  // [pulling warps][row buffers][H]: rows on their way from a peer to the pool; where they are not pulled,
                // f32 [kMaxDirectTokens][K blocks]: scales of the staged tokens
    RecvRows,   // u32 [R][E_local]: rows received per local expert from this source and all before it
    Touched,    // u16 [E_local]: experts that have received rows, ascending
    Entries,    // u16 [kMaxLoneEntries]: expert of every entry (comm/lone_rank.h)
    DirectEntries,  // u8 [kMaxDirectRows][8]: entry of a row, by block (comm/direct_rows.h)
    DirectWeights,  // f32 [kMaxDirectRows]: top-k weight of every entry
    Tasks,          // TileTask [kTaskDepth], and where weights are decoded ahead u32 [kTaskDepth]
    Amax,  // f32 [2][warpgroups][64], with swapped operands [2][warps][BM]: exchange between those that share a scale group
    Barriers,  // u64 [kNumBarriers]
    State,     // u32 [6]: aborted flag, launch epoch, staged tokens, touched experts, row blocks, K blocks of all tiles
    kCount
};

// The barriers in SmemField::Barriers, by index.
struct BarrierLayout {
    u32 stages;

    constexpr u32 full(u32 stage) const { return stage; }
    constexpr u32 empty(u32 stage) const { return stages + stage; }
    constexpr u32 task_full(u32 slot) const { return 2 * stages + slot; }
    constexpr u32 task_empty(u32 slot) const { return 2 * stages + kTaskDepth + slot; }
    constexpr u32 row(u32 warp, u32 buffer) const {
        return 2 * stages + 2 * kTaskDepth + warp * kMaxRowBuffers + buffer;
    }
    constexpr u32 counts_ready() const { return row(kNumDispatchWarps, 0); }
    constexpr u32 math() const { return counts_ready() + 1; }
    // Of CTAs that decode (roles/decode_ahead.h): a chunk has its slot, and it has been stored.
    constexpr u32 slot_given(u32 i) const { return math() + 1 + i; }
    constexpr u32 stored(u32 i) const { return math() + 1 + kSlotsGiven + i; }
    // Of kernels with decode warps.
    constexpr u32 packed_full(u32 i) const { return stored(kSlotsGiven) + i; }
    constexpr u32 packed_empty(u32 i) const { return packed_full(kPackedStages) + i; }
    constexpr u32 count() const { return packed_empty(kPackedStages); }
};

// Tiles whose weight scales are in shared memory at a time. The scales of a tile overwrite those of the tile so many
// before, when the loader has been given its first stage: by then that tile must have been multiplied.
constexpr u32 num_scale_tiles(const MegaMoeConfig& c, u32 stages) {
    const u32 ahead = stages + (c.has_decode_warps() ? kPackedStages : 0);
    return 1 + ceil_div(ahead - 1, min_of(c.l1_k_blocks(), ceil_div(c.l2_k_blocks(), c.l2_stage_k_blocks())));
}
// Floats of one of them.
constexpr u32 scale_tile_floats(const MegaMoeConfig& c) {
    return scale_records(max_of(c.l1_k_blocks(), c.l2_k_blocks())) * kWeightScaleRecord;
}

constexpr FieldSpec smem_field_spec_for(const MegaMoeConfig& c, u32 stages, u32 row_buffers, SmemField field) {
    switch (field) {
        case SmemField::A: return {"smem_a", Dtype::E4m3, {stages, c.l2_stage_k_blocks() * c.block_m, kBlockK}, 1024};
        case SmemField::B: return {"smem_b", Dtype::U8, {stages, stage_weight_bytes(c), 1}, 1024};
        case SmemField::Packed:
            return {"smem_packed",
                    Dtype::U8,
                    {c.has_decode_warps() ? kPackedStages : 0, weight_block_bytes(c.mma_type), 1},
                    1024};
        case SmemField::SfA: return {"smem_sf_a", Dtype::F32, {stages, c.l2_stage_k_blocks() * c.block_m, 1}, 128};
        case SmemField::SfB:
            return {"smem_sf_b", Dtype::F32, {num_scale_tiles(c, stages), scale_tile_floats(c), 1}, 128};
        case SmemField::RowBuffer:
            return {"smem_rows", Dtype::E4m3, {c.pull_warps(), row_buffers, align_up(c.hidden, 128u)}, 128};
        case SmemField::RecvRows: return {"smem_recv_rows", Dtype::U32, {c.num_ranks, c.experts_per_rank(), 1}, 16};
        case SmemField::Touched: return {"smem_touched", Dtype::U16, {c.experts_per_rank(), 1, 1}, 16};
        case SmemField::Entries:
            return {"smem_entries", Dtype::U16, {c.num_ranks == 1 ? kMaxLoneEntries : 0, 1, 1}, 16};
        case SmemField::DirectEntries:
            return {"smem_direct_entries", Dtype::U8, {c.has_direct_rows() ? kMaxDirectRows : 0, c.block_m, 1}, 16};
        case SmemField::DirectWeights:
            return {"smem_direct_weights", Dtype::F32, {c.has_direct_rows() ? kMaxDirectRows : 0, 1, 1}, 16};
        case SmemField::Tasks:
            return {"smem_tasks", Dtype::U32, {c.decodes_ahead() ? kTaskDepth + 1 : kTaskDepth, 4, 1}, 16};
        case SmemField::Amax:
            return {"smem_amax",
                    Dtype::F32,
                    {2, c.swaps_operands() ? c.math_warps() : c.math_warpgroups(), c.swaps_operands() ? c.block_m : 64},
                    16};
        case SmemField::Barriers: return {"smem_barriers", Dtype::U64, {BarrierLayout{stages}.count(), 1, 1}, 16};
        case SmemField::State: return {"smem_state", Dtype::U32, {6, 1, 1}, 16};
        default: return {"", Dtype::U8, {0, 1, 1}, 1};
    }
}

constexpr u64 smem_offset_for(const MegaMoeConfig& c, u32 stages, u32 row_buffers, SmemField field) {
    return field_offset([&](u32 i) { return smem_field_spec_for(c, stages, row_buffers, SmemField(i)); }, u32(field),
                        u32(SmemField::kCount), 1024);
}
constexpr u32 stages_beside(const MegaMoeConfig& c, u32 row_buffers) {
    u32 stages = kMaxStages;
    while (stages > 0 && smem_offset_for(c, stages, row_buffers, SmemField::kCount) > kMaxSmemBytes) --stages;
    return stages;
}

// Adjacent stages of a tile that MXFP4's math warps take at a time: two, where no tile has an odd number of them.
constexpr u32 stages_together(const MegaMoeConfig& c) {
    return c.decodes_in_registers() && c.l1_k_blocks() % 2 == 0 && c.l2_k_blocks() % 2 == 0 ? 2 : 1;
}

// As many stages as fit. A second row buffer may not cost one: five stages instead of four are 1 to 2 % at few tokens.
constexpr u32 num_stages(const MegaMoeConfig& c) {
    return stages_beside(c, 1) / stages_together(c) * stages_together(c);
}
constexpr u32 row_buffers(const MegaMoeConfig& c) {
    if (c.has_decode_warps()) return 1;  // there are no registers for a second row
    return stages_beside(c, kMaxRowBuffers) >= num_stages(c) ? kMaxRowBuffers : 1;
}

constexpr FieldSpec smem_field_spec(const MegaMoeConfig& c, SmemField field) {
    return smem_field_spec_for(c, num_stages(c), row_buffers(c), field);
}

constexpr u32 smem_offset(const MegaMoeConfig& c, SmemField field) {
    return u32(smem_offset_for(c, num_stages(c), row_buffers(c), field));
}

constexpr u32 smem_bytes(const MegaMoeConfig& c) { return smem_offset(c, SmemField::kCount); }

}  // namespace deep_moe
