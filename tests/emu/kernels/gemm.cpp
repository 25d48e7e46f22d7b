// D[64][128] = A[64][K] * B[128][K]^T in e4m3: warp 0 loads, warpgroup 1 multiplies. 256 threads, two stages.
// Shared memory: a 2 x 8 KiB, b 2 x 16 KiB at 16 KiB, barriers (full[2], empty[2]) at 48 KiB.
#include "common.h"

enum Plant {
    kNone,
    kSmallTx,
    kLargeTx,
    kNoEmptyWait,
    kNoWgmmaWait,
    kNoWgmmaFence,
    kNoCommit,
    kNoBarrierFence,
    kEarlyArrive,
    kNoFullWait,
    kOneWarpArrives,
    kWrongParity,
    kExtraArrival,
    kDivergence,
    kBadDescriptor,
    kReadEarly,
    kPromote
};

constexpr u32 kStages = 2;

DM_DEVICE u64 descriptor(const void* p) {
    const u64 address = hw::shared_address(p);
    return (address >> 4 & 0x3fff) | u64(1024 >> 4) << 32 | 1ull << 62;
}

DM_DEVICE void load(const Args* a, const Maps* maps, u8* smem, u64* full, u64* empty) {
    for (u32 kb = 0; kb < a->count; ++kb) {
        const u32 s = kb % kStages, round = kb / kStages;
        if (a->plant != kNoEmptyWait) wait_barrier(&empty[s], (round + 1) & 1);
        u32 bytes = 8192 + 16384;
        if (a->plant == kSmallTx) bytes = 16384;
        if (a->plant == kLargeTx) bytes += 16;
        hw::mbarrier_arrive_expect_tx(&full[s], bytes);
        hw::tma_load_2d(smem + s * 8192, &maps->maps[0], kb * 128, 0, &full[s]);
        hw::tma_load_2d(smem + 16384 + s * 16384, &maps->maps[1], kb * 128, 0, &full[s]);
    }
}

DM_DEVICE void multiply(const Args* a, u8* smem, u64* full, u64* empty) {
    float d[64] = {}, sum[64] = {};
    const u32 t = hw::thread_idx() % 128, lane = t % 32, warp = t / 32;
    for (u32 kb = 0; kb < a->count; ++kb) {
        const u32 s = kb % kStages, round = kb / kStages;
        if (a->plant != kNoFullWait) wait_barrier(&full[s], (round & 1) ^ u32(a->plant == kWrongParity && kb == 1));
        if (a->plant != kNoWgmmaFence) hw::wgmma_fence();
        for (u32 k = 0; k < 4; ++k) {
            const u32 skew = a->plant == kBadDescriptor ? 128 : 0;
            const bool accumulate = a->plant == kPromote ? k > 0 : kb + k > 0;
            hw::wgmma_m64k32_e4m3<128>(d, descriptor(smem + s * 8192 + skew) + k * 2,
                                       descriptor(smem + 16384 + s * 16384) + k * 2, accumulate);
        }
        if (a->plant != kNoCommit) hw::wgmma_commit();
        auto release = [&] {
            if (lane == 0 && (a->plant != kOneWarpArrives || warp == 0)) hw::mbarrier_arrive(&empty[s]);
        };
        if (a->plant == kEarlyArrive) release();
        if (a->plant == kReadEarly) sum[0] += d[0];
        if (a->plant != kNoWgmmaWait) hw::wgmma_wait<0>();
        if (a->plant != kEarlyArrive) release();
        if (a->plant == kExtraArrival && kb == 0 && t == 0)
            for (u32 i = 0; i < 4; ++i) hw::mbarrier_arrive(&empty[s]);
        if (a->plant == kPromote)
            for (u32 i = 0; i < 64; ++i) sum[i] = hw::fma(d[i], 1.0f, sum[i]);
    }
    if (a->plant != kPromote)
        for (u32 i = 0; i < 64; ++i) sum[i] += d[i];
    float* out = reinterpret_cast<float*>(a->out);
    for (u32 i = 0; i < 64; ++i) {
        const u32 row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        hw::store(out + row * 128 + column, sum[i]);
    }
}

extern "C" void gemm(const Args* a, const Maps* maps) {
    u8* smem = hw::shared_memory();
    u64* full = reinterpret_cast<u64*>(smem + 49152);
    u64* empty = full + kStages;
    if (hw::thread_idx() == 0) {
        for (u32 s = 0; s < kStages; ++s) {
            hw::mbarrier_init(&full[s], 1);
            hw::mbarrier_init(&empty[s], a->plant == kOneWarpArrives ? 1 : 4);
        }
        if (a->plant != kNoBarrierFence) hw::fence_mbarrier_init();
    }
    hw::sync_block();
    if (hw::thread_idx() / 128 == 0) {
        hw::lower_max_registers<40>();
        if (a->plant == kDivergence && hw::warp_idx() == 1) {
            if (hw::lane_idx() < 16)
                hw::ballot(true);
            else
                hw::sync_warp();
        }
        if (hw::warp_idx() == 0 && hw::lane_idx() == 0) load(a, maps, smem, full, empty);
    } else {
        hw::raise_max_registers<256>();
        multiply(a, smem, full, empty);
    }
}
