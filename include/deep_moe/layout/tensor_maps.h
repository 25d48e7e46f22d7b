// The tensor maps of the mega kernel (its activation pools), described once: the host encodes them for the GPU
// (cuTensorMapEncodeTiled) or for the emulator from the same TensorMapSpec.
#pragma once

#include "deep_moe/layout/buffer.h"

namespace deep_moe {

// Short: of tiles with at most kWarpgroupRows rows.
enum class MapIndex : u32 { L1Acts, L1ShortActs, L2Acts, L2ShortActs, kCount };

// e4m3 elements (1 byte), 128-byte swizzle, zero fill out of bounds. Dimension 0 is the contiguous one.
struct TensorMapSpec {
    const char* name;
    u32 rank;
    u64 dims[3];
    u64 strides[2];  // bytes, of dimensions 1 and 2
    u32 box[3];
};

constexpr TensorMapSpec tensor_map_spec(const MegaMoeConfig& c, MapIndex map) {
    const u64 h = c.hidden, i = c.padded_intermediate();
    switch (map) {
        case MapIndex::L1Acts: return {"l1_acts", 2, {h, c.ring_rows, 1}, {h, 0}, {kBlockK, c.block_m, 1}};
        case MapIndex::L1ShortActs:
            return {"l1_short_acts", 2, {h, c.ring_rows, 1}, {h, 0}, {kBlockK, kWarpgroupRows, 1}};
        case MapIndex::L2Acts: return {"l2_acts", 2, {i, c.ring_rows, 1}, {i, 0}, {kBlockK, c.block_m, 1}};
        default: return {"l2_short_acts", 2, {i, c.ring_rows, 1}, {i, 0}, {kBlockK, kWarpgroupRows, 1}};
    }
}

}  // namespace deep_moe
