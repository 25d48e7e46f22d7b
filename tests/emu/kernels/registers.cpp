// D[64][N] += A[64][128] * B[N][128]^T in e4m3 by one warpgroup, N = count: with A from shared memory, then with A from
// registers. Weights: A, B, row-major. out: f32 [2][64][N], holds the initial D. Shared memory: a 8 KiB, b 32 KiB.
#include "common.h"
#include "deep_moe/mma/descriptor.h"

enum Plant {
    kNone,
    kOverwrite,      // D is written, not added to
    kFenceByReader,  // the proxy fence behind the barrier
    kNoProxyFence,
    kNoWgmmaFence,
    kLateDecode,     // behind the fence
    kWaitTooLate,    // registers are decoded anew before the wgmma that reads them has been waited for
    kWriteInFlight,  // by one thread
    kMixedForms
};

constexpr u32 kRowBytes = 128, kMmaBytes = 32, kMmas = kRowBytes / kMmaBytes;

DM_DEVICE void copy_swizzled(u8* shared, const u8* rows, u32 num_rows, u32 t) {
    for (u32 i = t; i < num_rows * 8; i += 128)
        hw::store_shared(reinterpret_cast<Vec16*>(shared) + (i ^ i / 8 % 8),
                         hw::load(reinterpret_cast<const Vec16*>(rows) + i));
}

struct Fragment {
    u32 a[4];

    DM_DEVICE void load(const u8* rows, u32 k, u32 t) {
        const u8* p = rows + (t / 32 * 16 + t % 32 / 4) * kRowBytes + k + t % 4 * 4;
        for (u32 i = 0; i < 4; ++i)
            a[i] = hw::load(reinterpret_cast<const u32*>(p + i % 2 * 8 * kRowBytes + i / 2 * 16));
        for (u32 i = 0; i < 4; ++i) hw::wgmma_touch(a[i]);
    }
};

template <u32 kN>
struct Multiply {
    const Args* args;
    u64 desc_a, desc_b;
    u32 t = hw::thread_idx(), plant = args->plant;

    DM_DEVICE float* place(u32 form, u32 i) const {
        const u32 row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
        return reinterpret_cast<float*>(args->out) + (form * 64 + row) * kN + column;
    }
    DM_DEVICE bool accumulate(u32 k) const { return k != 0 || plant != kOverwrite; }

    DM_DEVICE void from_shared(float (&d)[kN / 2]) const {
        hw::wgmma_fence();
        for (u32 k = 0; k < kMmas; ++k)
            hw::wgmma_m64k32_e4m3<kN>(d, advance_descriptor(desc_a, k * kMmaBytes),
                                      advance_descriptor(desc_b, k * kMmaBytes), accumulate(k));
        hw::wgmma_commit();
        hw::wgmma_wait<0>();
    }

    // Two fragments in turns: one is loaded while a wgmma reads the other.
    DM_DEVICE void from_registers(float (&d)[kN / 2]) const {
        Fragment fragments[2];
        for (u32 k = 0; k < kMmas; ++k) {
            Fragment& f = fragments[k % 2];
            if (plant != kLateDecode) f.load(args->weights, k * kMmaBytes, t);
            if (plant != kNoWgmmaFence) hw::wgmma_fence();
            if (plant == kLateDecode) f.load(args->weights, k * kMmaBytes, t);
            const u64 b = advance_descriptor(desc_b, k * kMmaBytes);
            if (plant == kMixedForms && t / 32 == 2)
                hw::wgmma_m64k32_e4m3<kN>(d, u64(0), b, accumulate(k));
            else
                hw::wgmma_m64k32_e4m3<kN>(d, f.a, b, accumulate(k));
            hw::wgmma_commit();
            if (plant == kWriteInFlight && k == 2 && t == 77) ++f.a[3];
            if (plant == kWaitTooLate)
                hw::wgmma_wait<2>();
            else
                hw::wgmma_wait<1>();
        }
        hw::wgmma_wait<0>();
    }

    DM_DEVICE void run() const {
        for (u32 form = 0; form < 2; ++form) {
            float d[kN / 2];
            for (u32 i = 0; i < kN / 2; ++i) d[i] = hw::load(place(form, i));
            if (form == 0)
                from_shared(d);
            else
                from_registers(d);
            for (u32 i = 0; i < kN / 2; ++i) hw::store(place(form, i), d[i]);
        }
    }
};

extern "C" void registers(const Args* a) {
    const u32 t = hw::thread_idx(), n = a->count;
    u8 *smem_a = hw::shared_memory(), *smem_b = smem_a + 64 * kRowBytes;
    copy_swizzled(smem_a, a->weights, 64, t);
    copy_swizzled(smem_b, a->weights + 64 * kRowBytes, n, t);
    if (a->plant != kNoProxyFence && a->plant != kFenceByReader) hw::fence_proxy_async_shared();
    hw::sync_block();
    if (a->plant == kFenceByReader) hw::fence_proxy_async_shared();
    const u64 desc_a = swizzle128_descriptor(hw::shared_address(smem_a));
    const u64 desc_b = swizzle128_descriptor(hw::shared_address(smem_b));
    if (n == 8) Multiply<8>{a, desc_a, desc_b}.run();
    if (n == 16) Multiply<16>{a, desc_a, desc_b}.run();
    if (n == 32) Multiply<32>{a, desc_a, desc_b}.run();
    if (n == 64) Multiply<64>{a, desc_a, desc_b}.run();
    if (n == 128) Multiply<128>{a, desc_a, desc_b}.run();
    if (n == 256) Multiply<256>{a, desc_a, desc_b}.run();
}
