// mbarriers, bulk copies and tensor (TMA) loads, for the emulator. Names and meaning: hw/cuda/async.cuh.
#pragma once

#include "deep_moe/hw/emu/api.h"

namespace deep_moe::hw {

DM_DEVICE u8* shared_memory() { return emu::self()->shared_memory; }
// Address inside the shared window, as descriptors want it.
DM_DEVICE u32 shared_address(const void* p) {
    emu::ThreadHead* t = emu::self();
    return t->api->shared_address(t, p);
}

DM_DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
    emu::ThreadHead* t = emu::self();
    t->api->mbarrier_init(t, barrier, arrivals);
}
DM_DEVICE void fence_mbarrier_init() {
    emu::ThreadHead* t = emu::self();
    t->api->fence_mbarrier_init(t);
}
DM_DEVICE void mbarrier_arrive(u64* barrier) {
    emu::ThreadHead* t = emu::self();
    t->api->mbarrier_arrive(t, barrier, 0);
}
DM_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    emu::ThreadHead* t = emu::self();
    t->api->mbarrier_arrive(t, barrier, bytes);
}
// True once the phase with this parity has completed.
DM_DEVICE bool mbarrier_test_wait(u64* barrier, u32 parity) {
    emu::ThreadHead* t = emu::self();
    return t->api->mbarrier_test_wait(t, barrier, parity);
}
// The same. Sleeps first; false is rare, but happens.
DM_DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity) {
    emu::ThreadHead* t = emu::self();
    return t->api->mbarrier_try_wait(t, barrier, parity);
}

DM_DEVICE u64* emu_barrier(u32 address) {
    return reinterpret_cast<u64*>(shared_memory() + (address - shared_address(shared_memory())));
}
template <u32 kBytes>
DM_DEVICE void mbarrier_arrive_at(u32 address) {
    mbarrier_arrive(emu_barrier(address + kBytes));
}
template <u32 kBytes>
DM_DEVICE bool mbarrier_test_wait_at(u32 address, u32 parity) {
    return mbarrier_test_wait(emu_barrier(address + kBytes), parity);
}

DM_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    emu::ThreadHead* t = emu::self();
    t->api->bulk_load(t, shared, global, bytes, barrier, 1u << t->cluster_rank);
}
DM_DEVICE void bulk_load_evict_first(void* shared, const void* global, u32 bytes, u64* barrier) {
    bulk_load(shared, global, bytes, barrier);
}
DM_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
    emu::ThreadHead* t = emu::self();
    t->api->bulk_store(t, global, shared, bytes);
}
DM_DEVICE void bulk_commit() {
    emu::ThreadHead* t = emu::self();
    t->api->bulk_commit(t);
}
template <u32 kPending>
DM_DEVICE void bulk_wait() {
    emu::ThreadHead* t = emu::self();
    t->api->bulk_wait(t, kPending);
}

DM_DEVICE void prefetch_tensor_map(const TensorMap* /*map*/) {}
DM_DEVICE void tma_load_2d(void* shared, const TensorMap* map, u32 x, u32 y, u64* barrier) {
    emu::ThreadHead* t = emu::self();
    const u32 coordinates[3] = {x, y, 0};
    t->api->tma_load(t, shared, map, 2, coordinates, barrier, 1u << t->cluster_rank);
}
DM_DEVICE void tma_load_3d(void* shared, const TensorMap* map, u32 x, u32 y, u32 z, u64* barrier) {
    emu::ThreadHead* t = emu::self();
    const u32 coordinates[3] = {x, y, z};
    t->api->tma_load(t, shared, map, 3, coordinates, barrier, 1u << t->cluster_rank);
}

}  // namespace deep_moe::hw
