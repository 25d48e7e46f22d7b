// The tensor maps of the mega kernel, described once: the host encodes them for the GPU (cuTensorMapEncodeTiled)
// or for the emulator from the same TensorMapSpec.
#pragma once

#include "deep_moe/layout/buffer.h"
#include "deep_moe/layout/weights.h"

namespace deep_moe {

// Short: of tiles with at most kWarpgroupRows rows.
enum class MapIndex : u32 { L1Acts, L1ShortActs, L1Weights, L2Acts, L2ShortActs, L2Weights, kCount };

// e4m3 elements (1 byte), 128-byte swizzle, zero fill out of bounds. Dimension 0 is the contiguous one.
struct TensorMapSpec {
    const char* name;
    u32 rank;
    u64 dims[3];
    u64 strides[2];  // bytes, of dimensions 1 and 2
    u32 box[3];
};

constexpr TensorMapSpec tensor_map_spec(const MegaMoeConfig& c, MapIndex map) {
    const u64 h = c.hidden, i = c.intermediate, ip = c.padded_intermediate(), l1 = l1_rows(c),
              local = c.experts_per_rank();
    switch (map) {
        case MapIndex::L1Acts: return {"l1_acts", 2, {h, c.ring_rows, 1}, {h, 0}, {kBlockK, c.block_m, 1}};
        case MapIndex::L1Weights: return {"l1_weights", 3, {h, l1, local}, {h, l1 * h}, {kBlockK, kBlockN, 1}};
        case MapIndex::L1ShortActs:
            return {"l1_short_acts", 2, {h, c.ring_rows, 1}, {h, 0}, {kBlockK, kWarpgroupRows, 1}};
        case MapIndex::L2Acts: return {"l2_acts", 2, {ip, c.ring_rows, 1}, {ip, 0}, {kBlockK, c.block_m, 1}};
        case MapIndex::L2ShortActs:
            return {"l2_short_acts", 2, {ip, c.ring_rows, 1}, {ip, 0}, {kBlockK, kWarpgroupRows, 1}};
        default: return {"l2_weights", 3, {i, h, local}, {i, h * i}, {kBlockK, kBlockN, 1}};
    }
}

}  // namespace deep_moe
