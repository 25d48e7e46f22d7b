// Pairs of CTAs. `pair_gemm`: D[64][128] = sum over kb of sf[kb] * A[64][kb] * B[128][kb]^T for each CTA, with its own
// rows of A; B and the scales are the same for both CTAs of a cluster and loaded once, by multicast: each CTA brings
// half of B, the first one the scales. 256 threads: warp 0 loads, warpgroup 1 multiplies.
// Shared memory: a 2 x 8 KiB, b 2 x 16 KiB at 16 KiB, sf 2 x 128 B at 48 KiB, barriers (full[2], empty[2]) after it.
#include "common.h"

enum Plant {
    kNone,
    kThreeDimensions,
    kNoEmptyWait,
    kOwnEmptyOnly,
    kNoRemoteArrive,
    kOwnBytes,
    kNoStartSync,
    kNoEndSync,
    kEarlyArrive,
    kNoWarpSync,
    kNoFullWait
};

constexpr u32 kStages = 2, kBarriers = 49152 + 256, kScaleBytes = 128;

DM_DEVICE u64 descriptor(const void* p) {
    const u64 address = hw::shared_address(p);
    return (address >> 4 & 0x3fff) | u64(1024 >> 4) << 32 | 1ull << 62;
}

DM_DEVICE void load(const Args* a, const Maps* maps, u8* smem, u64* full, u64* empty) {
    const u32 rank = hw::cluster_rank();
    for (u32 kb = 0; kb < a->count; ++kb) {
        const u32 s = kb % kStages, round = kb / kStages;
        if (a->plant != kNoEmptyWait) wait_barrier(&empty[s], (round + 1) & 1);
        hw::mbarrier_arrive_expect_tx(&full[s], 8192 + (a->plant == kOwnBytes ? 8192 : 16384) + kScaleBytes);
        hw::tma_load_2d(smem + s * 8192, &maps->maps[0], kb * 128, hw::block_idx() * 64, &full[s]);
        u8* half = smem + 16384 + s * 16384 + rank * 8192;
        if (a->plant == kThreeDimensions)
            hw::tma_load_3d_multicast(half, &maps->maps[1], kb * 128, 0, rank, &full[s], 3);
        else
            hw::tma_load_2d_multicast(half, &maps->maps[1], kb * 128, rank * 64, &full[s], 3);
        if (rank == 0)
            hw::bulk_load_multicast(smem + 49152 + s * kScaleBytes, a->weights + kb * kScaleBytes, kScaleBytes,
                                    &full[s], 3);
    }
}

DM_DEVICE void multiply(const Args* a, u8* smem, u64* full, u64* empty) {
    float d[64] = {}, sum[64] = {};
    const u32 lane = hw::lane_idx(), warp = hw::warp_idx() % 4;
    for (u32 kb = 0; kb < a->count; ++kb) {
        const u32 s = kb % kStages, round = kb / kStages;
        // Hands the stage back to both CTAs, which will load into it.
        auto release = [&] {
            if (a->plant != kNoWarpSync) hw::sync_warp();
            const bool only_here = a->plant == kOwnEmptyOnly || a->plant == kNoRemoteArrive;
            if (only_here ? lane == hw::cluster_rank() : lane < 2) hw::mbarrier_arrive_cluster(&empty[s], lane);
        };
        if (a->plant != kNoFullWait) wait_barrier(&full[s], round & 1);
        for (u32 i = 0; i < 64; ++i) hw::wgmma_touch(d[i]);
        hw::wgmma_fence();
        for (u32 k = 0; k < 4; ++k)
            hw::wgmma_m64k32_e4m3<128>(d, descriptor(smem + s * 8192) + k * 2,
                                       descriptor(smem + 16384 + s * 16384) + k * 2, k > 0);
        hw::wgmma_commit();
        const float scale = hw::load_shared(reinterpret_cast<float*>(smem + 49152 + s * kScaleBytes) + lane);
        if (a->plant == kEarlyArrive) release();
        hw::wgmma_wait<0>();
        for (u32 i = 0; i < 64; ++i) hw::wgmma_touch(d[i]);
        if (a->plant != kEarlyArrive) release();
        for (u32 i = 0; i < 64; ++i) sum[i] = hw::fma(d[i], scale, sum[i]);
    }
    float* out = reinterpret_cast<float*>(a->out) + hw::block_idx() * 64 * 128;
    for (u32 i = 0; i < 64; ++i) {
        const u32 row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        hw::store(out + row * 128 + column, sum[i]);
    }
}

DM_DEVICE void run_pair_gemm(const Args* a, const Maps* maps) {
    u8* smem = hw::shared_memory();
    u64* full = reinterpret_cast<u64*>(smem + kBarriers);
    u64* empty = full + kStages;
    if (hw::thread_idx() == 0) {
        for (u32 s = 0; s < kStages; ++s) {
            hw::mbarrier_init(&full[s], 1);
            hw::mbarrier_init(&empty[s], a->plant == kOwnEmptyOnly ? 4 : 8);
        }
        hw::fence_mbarrier_init();
    }
    if (a->plant == kNoStartSync)
        hw::sync_block();
    else
        hw::sync_cluster();
    if (hw::thread_idx() / 128 == 0) {
        if (hw::thread_idx() == 0) load(a, maps, smem, full, empty);
    } else {
        multiply(a, smem, full, empty);
    }
    if (a->plant != kNoEndSync) hw::sync_cluster();
}
DM_TEST_KERNEL(pair_gemm, 256, run_pair_gemm)

enum Case {
    kRanks,
    kSync,
    kNoSync,
    kSyncAfterEnds,
    kSyncDeadlock,
    kBarrierDeadlock,
    kArriveOrdersNoWrites,
    kArriveAfterEnd,
    kLoadAfterEnd,
    kLoadDuringEnd,
    kEndUnordered,
    kNoSuchCta,
    kLoadNowhere,
    kLoadBeyond,
    kLandsApart
};

DM_DEVICE void linger() {
    for (u32 i = 0; i < 20000; ++i) hw::timer_ns();
}

// 64 threads. Memory of a rank: a word per thread of the grid; shared memory: 128 bytes, two barriers at 256.
DM_DEVICE void run_cluster(const Args* a, const Maps* /*maps*/) {
    const u32 t = hw::thread_idx(), block = hw::block_idx(), rank = hw::cluster_rank();
    u8* smem = hw::shared_memory();
    u64* barriers = reinterpret_cast<u64*>(smem + 256);
    u32* words = reinterpret_cast<u32*>(a->peers[a->rank]);
    u32* out = reinterpret_cast<u32*>(a->out) + block * 64 + t;
    if (t == 0) {
        hw::mbarrier_init(&barriers[0], 1);
        hw::mbarrier_init(&barriers[1], 2);
        hw::fence_mbarrier_init();
    }
    hw::sync_cluster();
    const bool leads = rank == 0 && t == 0;
    switch (a->plant) {
        case kRanks: hw::store(out, rank); break;
        case kSyncAfterEnds:
            if (t % 32 >= 8 || (t >= 32 && rank == 1)) hw::exit_thread();
            [[fallthrough]];
        case kSync:
        case kNoSync:
            hw::store(words + block * 64 + t, block * 1000 + t);
            if (a->plant != kNoSync) hw::sync_cluster();
            if (t < 32) hw::store(out, hw::load(words + (block ^ 1) * 64 + t));
            return;
        case kSyncDeadlock:
            if (rank == 0 || t < 32)
                hw::sync_cluster();
            else
                while (hw::load_acquire<hw::Scope::Sys>(words) != 5) hw::poll_pause(5, 12, words);
            return;
        case kBarrierDeadlock:
            if (leads) hw::mbarrier_arrive_cluster(&barriers[1], 1);
            if (rank == 1 && t == 0) wait_barrier(&barriers[1], 0);
            break;
        case kArriveOrdersNoWrites:
            if (rank == 1 && t == 0) {
                hw::store(words, 7u);
                hw::mbarrier_arrive_cluster(&barriers[0], 0);
            }
            if (leads) {
                wait_barrier(&barriers[0], 0);
                hw::store(out, hw::load(words));
            }
            break;
        case kArriveAfterEnd:
        case kLoadAfterEnd:
            if (!leads) return;
            linger();
            if (a->plant == kArriveAfterEnd)
                hw::mbarrier_arrive_cluster(&barriers[0], 1);
            else
                hw::bulk_load_multicast(smem, a->peers[a->rank] + 4096, 128, &barriers[0], 2);
            return;
        case kLoadDuringEnd:
            hw::sync_block();
            if (leads) hw::bulk_load_multicast(smem, a->peers[a->rank] + 4096, 128, &barriers[0], 2);
            if (rank == 1 && t == 0) hw::mbarrier_arrive_expect_tx(&barriers[0], 128);
            if (rank == 0) linger();
            return;
        case kEndUnordered:
            if (leads) hw::mbarrier_arrive_cluster(&barriers[1], 1);
            if (rank == 1) linger();
            return;
        case kNoSuchCta:
            if (leads) hw::mbarrier_arrive_cluster(&barriers[1], 2);
            break;
        case kLoadNowhere:
        case kLoadBeyond:
            if (t == 0)
                hw::bulk_load_multicast(smem, a->peers[a->rank] + 4096, 128, &barriers[0],
                                        a->plant == kLoadNowhere ? 0 : 3);
            break;
        case kLandsApart:  // that the first CTA has its copy says nothing of the second
            if (t == 0) hw::mbarrier_arrive_expect_tx(&barriers[0], 128);
            if (leads) {
                hw::bulk_load_multicast(smem, a->peers[a->rank] + 4096, 128, &barriers[0], 3);
                wait_barrier(&barriers[0], 0);
                hw::mbarrier_arrive_cluster(&barriers[1], 1);
                hw::mbarrier_arrive_cluster(&barriers[1], 1);
            }
            if (rank == 1 && t == 0) {
                wait_barrier(&barriers[1], 0);
                hw::store(out, hw::load_shared(reinterpret_cast<u32*>(smem)));
            }
            break;
        default: break;
    }
    hw::sync_cluster();
}
DM_TEST_KERNEL(cluster, 64, run_cluster)
