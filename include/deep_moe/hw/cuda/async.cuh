// mbarriers, bulk copies and tensor (TMA) loads.
#pragma once

#include "deep_moe/hw/cuda/memory.cuh"
#include "deep_moe/layout/params.h"

namespace deep_moe::hw {

// Start of the CTA's dynamic shared memory, aligned to 1024 bytes.
DM_DEVICE u8* shared_memory() {
    extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
    return dynamic_shared_memory;
}
// Address inside the shared window, as descriptors want it.
DM_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DM_DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the async proxy; before sync_block().
DM_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DM_DEVICE void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DM_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// True once the phase with this parity has completed.
DM_DEVICE bool mbarrier_test_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}
// The same. May sleep for a hardware-chosen time first.
DM_DEVICE bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// The same for a barrier kBytes behind a shared_address. That is a part of the instruction; ptxas makes none of what is
// added to a pointer.
template <u32 kBytes>
DM_DEVICE void mbarrier_arrive_at(u32 address) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0+%1];" ::"r"(address), "n"(kBytes) : "memory");
}
template <u32 kBytes>
DM_DEVICE bool mbarrier_test_wait_at(u32 address, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1+%3], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address), "r"(parity), "n"(kBytes)
        : "memory");
    return done != 0;
}

// Global (own or peer) to shared; completes on the barrier. 16-byte aligned, a multiple of 16 bytes.
DM_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// The same for what other lines in the L2 cache should not make room for.
DM_DEVICE void bulk_load_evict_first(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(evict_first_policy())
        : "memory");
}
// Shared to global; completes on the thread's bulk group.
DM_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
DM_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups are in flight; their writes are then visible to this thread.
template <u32 kPending>
DM_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

DM_DEVICE void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DM_DEVICE void tma_load_2d(void* shared, const TensorMap* map, u32 x, u32 y, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
}
DM_DEVICE void tma_load_3d(void* shared, const TensorMap* map, u32 x, u32 y, u32 z, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}

}  // namespace deep_moe::hw
