// Does one K = 128 block give the same bits whatever the instruction width (n64, n128, n256) and whichever operand the
// weights are? The canonical order of the numerical contract (partials of exactly 128 of K) rests on the answer.
//
//   nvcc -std=c++20 --expt-relaxed-constexpr -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude \
//        bench/experiments/wgmma_widths.cu -o /tmp/wgmma_widths && /tmp/wgmma_widths
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "deep_moe/hw/hw.h"
#include "deep_moe/mma/descriptor.h"

using namespace deep_moe;

constexpr u32 kRows = 256, kK = 128;

// Rows of 128 bytes with the 128-byte swizzle.
__device__ void fill(u8* shared, const u8* global) {
    for (u32 i = threadIdx.x; i < kRows * kK / 16; i += blockDim.x) {
        const u32 row = i / 8, chunk = i % 8;
        reinterpret_cast<Vec16*>(shared)[row * 8 + (chunk ^ (row % 8))] = reinterpret_cast<const Vec16*>(global)[i];
    }
}

template <u32 kN>
__device__ void multiply(u8* a, u8* b, float* d, bool transposed) {
    for (u32 m = 0; m < kRows; m += 64)
        for (u32 n = 0; n < kRows; n += kN) {
            float acc[kN / 2];
            const u64 da = swizzle128_descriptor(hw::shared_address(a + m * kK));
            const u64 db = swizzle128_descriptor(hw::shared_address(b + n * kK));
            for (u32 i = 0; i < kN / 2; ++i) hw::wgmma_touch(acc[i]);
            hw::wgmma_fence();
    DM_UNROLL
            for (u32 k = 0; k < kK; k += 32)
                hw::wgmma_m64k32_e4m3<kN>(acc, advance_descriptor(da, k), advance_descriptor(db, k), k != 0);
            hw::wgmma_commit();
            hw::wgmma_wait<0>();
            for (u32 i = 0; i < kN / 2; ++i) {
                hw::wgmma_touch(acc[i]);
                const u32 row = m + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
                const u32 column = n + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                d[transposed ? column * kRows + row : row * kRows + column] = acc[i];
            }
        }
}

__global__ void __launch_bounds__(128, 1) widths(const u8* a_global, const u8* b_global, float* d) {
    u8* a = hw::shared_memory();
    u8* b = a + kRows * kK;
    fill(a, a_global);
    fill(b, b_global);
    hw::fence_proxy_async();
    __syncthreads();
    multiply<64>(a, b, d, false);
    multiply<128>(a, b, d + kRows * kRows, false);
    multiply<256>(a, b, d + 2 * kRows * kRows, false);
    multiply<64>(b, a, d + 3 * kRows * kRows, true);
    multiply<256>(b, a, d + 4 * kRows * kRows, true);
}

int main() {
    const char* names[] = {"n64", "n128", "n256", "swapped n64", "swapped n256"};
    for (int kind = 0; kind < 3; ++kind) {
        std::vector<u8> a(kRows * kK), b(kRows * kK);
        srand(kind + 1);
        for (auto* m : {&a, &b})
            for (u8& x : *m) {
                x = u8(rand());
                if (kind == 1) x = 0x28 + x % 0x18;            // same sign, similar size
                if (kind == 2 && x % 4) x = x & 0x80;           // sparse, with large differences of exponent
                if ((x & 0x7f) == 0x7f) x ^= 1;                 // no NaN
            }
        u8 *da, *db;
        float* dd;
        const size_t elements = kRows * kRows;
        cudaMalloc(&da, a.size());
        cudaMalloc(&db, b.size());
        cudaMalloc(&dd, 5 * elements * 4);
        cudaMemcpy(da, a.data(), a.size(), cudaMemcpyHostToDevice);
        cudaMemcpy(db, b.data(), b.size(), cudaMemcpyHostToDevice);
        cudaFuncSetAttribute(widths, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
        widths<<<1, 128, 65536>>>(da, db, dd);
        std::vector<float> d(5 * elements);
        if (cudaMemcpy(d.data(), dd, d.size() * 4, cudaMemcpyDeviceToHost) != cudaSuccess) {
            printf("CUDA error: %s\n", cudaGetErrorString(cudaGetLastError()));
            return 1;
        }
        for (int v = 1; v < 5; ++v) {
            size_t different = 0;
            for (size_t i = 0; i < elements; ++i)
                different += reinterpret_cast<u32&>(d[i]) != reinterpret_cast<u32&>(d[v * elements + i]);
            printf("data %d: %-12s against n64: %zu of %zu elements differ\n", kind, names[v], different, elements);
        }
        cudaFree(da);
        cudaFree(db);
        cudaFree(dd);
    }
}
