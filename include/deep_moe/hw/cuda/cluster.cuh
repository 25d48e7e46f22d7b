// Thread block clusters: CTAs that the hardware runs side by side, that can load into each other's shared memory and
// arrive on each other's mbarriers. Without a cluster in the launch a CTA is a cluster of its own, of rank 0.
//
// A CTA's shared memory dies with its last thread: whoever loads into or arrives in another CTA must know that it is
// still there, so all threads of a cluster meet at sync_cluster() before the first such access and after the last.
#pragma once

#include "deep_moe/hw/cuda/async.cuh"

namespace deep_moe::hw {

// Rank of this CTA in its cluster: the bit of the masks below.
DM_DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of the cluster that have not exited meet; orders everything before it, in all of its CTAs.
DM_DEVICE void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}

// Arrives on the barrier at the same place in the shared memory of another CTA (or this one). It hands a buffer back:
// this thread's reads, and the wgmmas it has waited for, are over when the barrier completes, but what it has written
// need not be visible to another CTA. mbarrier_try_wait is the wait for it.
// NOTES: cutlass::arch::ClusterBarrier and DeepGEMM use the same two instructions, of .cta scope by default. The
// stronger .release.cluster compiles to MEMBAR.ALL.GPU before every arrival, and .acquire.cluster to an invalidation
// of L1 after every wait (sm_90a, CUDA 13.0).
DM_DEVICE void mbarrier_arrive_cluster(u64* barrier, u32 cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(cta_rank)
        : "memory");
}

// The loads of async.cuh into several CTAs at once: bit i of cta_mask is the CTA of rank i. Data and completed bytes go
// to the same places in the shared memory of each of them as `shared` and `barrier` have here; each CTA expects the
// bytes on its own barrier.
DM_DEVICE void bulk_load_multicast(void* shared, const void* global, u32 bytes, u64* barrier, u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(cta_mask)
        : "memory");
}
DM_DEVICE void tma_load_2d_multicast(void* shared, const TensorMap* map, u32 x, u32 y, u64* barrier, u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(cta_mask)
        : "memory");
}
DM_DEVICE void tma_load_3d_multicast(void* shared, const TensorMap* map, u32 x, u32 y, u32 z, u64* barrier,
                                     u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(cta_mask)
        : "memory");
}

}  // namespace deep_moe::hw
