// Thread block clusters, for the emulator. Names and meaning: hw/cuda/cluster.cuh.
#pragma once

#include "deep_moe/hw/emu/common.h"

namespace deep_moe::hw {

DM_DEVICE u32 cluster_rank() { return emu::self()->cluster_rank; }
DM_DEVICE void sync_cluster() { emu_collective(emu::Collective::SyncCluster, 0, 0); }

// Orders reads only, as on the GPU: a thread that waits for the barrier may overwrite what this thread has read, but
// may not read what it has written.
DM_DEVICE void mbarrier_arrive_cluster(u64* barrier, u32 cta_rank) {
    emu::ThreadHead* t = emu::self();
    t->api->mbarrier_arrive_cluster(t, barrier, cta_rank);
}

DM_DEVICE void bulk_load_multicast(void* shared, const void* global, u32 bytes, u64* barrier, u16 cta_mask) {
    emu::ThreadHead* t = emu::self();
    t->api->bulk_load(t, shared, global, bytes, barrier, cta_mask);
}
DM_DEVICE void tma_load_2d_multicast(void* shared, const TensorMap* map, u32 x, u32 y, u64* barrier, u16 cta_mask) {
    emu::ThreadHead* t = emu::self();
    const u32 coordinates[3] = {x, y, 0};
    t->api->tma_load(t, shared, map, 2, coordinates, barrier, cta_mask);
}
DM_DEVICE void tma_load_3d_multicast(void* shared, const TensorMap* map, u32 x, u32 y, u32 z, u64* barrier,
                                     u16 cta_mask) {
    emu::ThreadHead* t = emu::self();
    const u32 coordinates[3] = {x, y, z};
    t->api->tma_load(t, shared, map, 3, coordinates, barrier, cta_mask);
}

}  // namespace deep_moe::hw
