// mbarriers and what completes on them.
#pragma once

#include "cluster.h"
#include "memory.h"

namespace deep_moe::emu {

constexpr i64 kMaxTransactionBytes = (1 << 20) - 1;

// The initialised barrier at this address of a CTA, whose initialisation f knows of; a fault otherwise.
Barrier& find_barrier(Fiber* f, const Cta& cta, const u64* p, const char* what);
// The same for a barrier that an asynchronous load is to complete on.
Barrier& find_async_barrier(Fiber* f, const Cta& cta, const u64* p, const char* what);
// Bytes have arrived that were issued in phase `phase` of the barrier.
void complete_bytes(WorldImpl& world, Cta& cta, Barrier& b, u32 phase, u32 bytes);

// What encode_tensor_map puts into a TensorMap.
struct TensorMapImage {
    u32 magic, rank;
    u8* base;
    u64 dims[3];
    u64 strides[2];
    u32 box[3];
    char name[20];
};
static_assert(sizeof(TensorMapImage) <= sizeof(TensorMap));

// Calls visit(global row or null, shared offset of the row in the box, bytes inside the tensor) for every row of a box.
template <typename Visit>
void for_box_rows(const TensorMapImage& m, const u32* coordinates, const Visit& visit) {
    const i64 x = i32(coordinates[0]), y = i32(coordinates[1]), z = m.rank == 3 ? i32(coordinates[2]) : 0;
    const u32 planes = m.rank == 3 ? m.box[2] : 1;
    for (u32 dz = 0; dz < planes; ++dz)
        for (u32 dy = 0; dy < m.box[1]; ++dy) {
            const i64 row = y + dy, plane = z + dz;
            const bool inside =
                row >= 0 && u64(row) < m.dims[1] && plane >= 0 && (m.rank < 3 || u64(plane) < m.dims[2]);
            // Columns [first, last) of the box are inside the tensor.
            const i64 first = x < 0 ? -x : 0;
            const i64 last = min_of<i64>(m.box[0], i64(m.dims[0]) - x);
            const u32 offset = (dz * m.box[1] + dy) * m.box[0];
            if (!inside || first >= last)
                visit(static_cast<u8*>(nullptr), offset, 0u, 0u);
            else
                visit(m.base + row * m.strides[0] + plane * m.strides[1] + x + first, offset, u32(first),
                      u32(last - first));
        }
}

const TensorMapImage& decode_tensor_map(Fiber* f, const TensorMap* map, u32 rank);

}  // namespace deep_moe::emu
