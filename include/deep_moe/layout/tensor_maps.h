// The tensor maps of the mega kernel (staged tokens, activation pools), described once: the host encodes them for the GPU
// (cuTensorMapEncodeTiled) or for the emulator from the same TensorMapSpec.
#pragma once

#include "deep_moe/layout/buffer.h"

namespace deep_moe {

// A row block of a pool: of a K block (L2Acts where a stage holds several: of all K blocks of a stage), whole or a box of rows.
// StagedRow: a K block of one token.
enum class MapIndex : u32 { L1Acts, L1ActsBox, L2Acts, L2ActsBox, StagedRow, kCount };

// e4m3 elements (1 byte), 128-byte swizzle, zero fill out of bounds. Dimension 0 is the contiguous one.
struct TensorMapSpec {
    const char* name;
    u32 rank;
    u64 dims[3];
    u64 strides[2];  // bytes, of dimensions 1 and 2
    u32 box[3];
};

constexpr TensorMapSpec tensor_map_spec(const MegaMoeConfig& c, MapIndex map) {
    const auto pool = [&c](const char* name, u64 columns, u32 rows) -> TensorMapSpec {
        return {name, 2, {columns, c.ring_rows, 1}, {columns, 0}, {kBlockK, rows, 1}};
    };
    switch (map) {
        case MapIndex::L1Acts: return pool("l1_acts", c.hidden, c.block_m);
        case MapIndex::L1ActsBox: return pool("l1_acts_box", c.hidden, c.box_rows());
        case MapIndex::L2Acts:
            if (c.l2_stage_k_blocks() > 1)
                return {"l2_acts",
                        3,
                        {kBlockK, c.ring_rows, c.l2_k_blocks()},
                        {c.padded_intermediate(), kBlockK},
                        {kBlockK, c.block_m, c.l2_stage_k_blocks()}};
            return pool("l2_acts", c.padded_intermediate(), c.block_m);
        case MapIndex::StagedRow: return {"x", 2, {c.hidden, c.max_tokens_per_rank, 1}, {c.hidden, 0}, {kBlockK, 1, 1}};
        default: return pool("l2_acts_box", c.padded_intermediate(), c.box_rows());
    }
}

}  // namespace deep_moe
