// How long are four dependent wgmmas m64nNk32 (a K block) of one to four warpgroups, with A from registers and from shared
// memory, and what do ordinary instructions of other warpgroups beside them cost, and cost them?
//
//   nvcc -std=c++20 --expt-relaxed-constexpr -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude \
//        bench/experiments/wgmma_beside.cu -o /tmp/wgmma_beside && /tmp/wgmma_beside
#include <cstdio>

#include "deep_moe/hw/hw.h"
#include "deep_moe/mma/descriptor.h"

using namespace deep_moe;

enum class Beside { Lop3, Prmt, Ffma };

constexpr u32 kRounds = 2000, kInstructions = 64;  // of each round of an ordinary warp

// The sum goes on from round to round: without a use ptxas leaves wgmmas out.
template <u32 kN, bool kFromRegisters>
__device__ float wgmma_rounds(u64 desc) {
    float d[kN / 2] = {};
    u32 a[4][4];
    for (u32 i = 0; i < 16; ++i) a[i / 4][i % 4] = threadIdx.x * 77 + i;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round) {
        for (float& each : d) hw::wgmma_touch(each);
        for (auto& fragment : a)
            for (u32& each : fragment) hw::wgmma_touch(each);
        hw::wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if constexpr (kFromRegisters)
                hw::wgmma_m64k32_e4m3<kN>(d, a[i], advance_descriptor(desc, 32 * i), true);
            else
                hw::wgmma_m64k32_e4m3<kN>(d, desc, advance_descriptor(desc, 32 * i), true);
        hw::wgmma_commit();
        hw::wgmma_wait<0>();
    }
    float sum = 0;
    for (float& each : d) sum += each;
    return sum;
}

template <Beside kKind>
__device__ float ordinary_rounds() {
    u32 x[8];
    float f[8];
    for (u32 i = 0; i < 8; ++i) x[i] = threadIdx.x + i, f[i] = i;
#pragma unroll 1
    for (u32 round = 0; round < kRounds; ++round)
#pragma unroll
        for (u32 i = 0; i < kInstructions; ++i) {
            u32& to = x[i % 8];
            const u32 other = x[(i + 1) % 8];
            if (kKind == Beside::Lop3)
                asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(to) : "r"(other), "r"(round));
            if (kKind == Beside::Prmt) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(to) : "r"(other), "r"(round));
            if (kKind == Beside::Ffma)
                asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f[i % 8]) : "f"(f[(i + 1) % 8]));
        }
    float sum = 0;
    for (u32 i = 0; i < 8; ++i) sum += f[i] + float(x[i]);
    return sum;
}

template <u32 kN, bool kFromRegisters, Beside kKind>
__global__ void __launch_bounds__(640, 1) run(u32* clocks, float* sink, u32 wgmma_warpgroups) {
    extern __shared__ __align__(1024) u8 shared[];
    for (u32 i = threadIdx.x; i < 32768; i += blockDim.x) shared[i] = u8(i * 37) & 0x3f;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const u64 desc = swizzle128_descriptor(hw::shared_address(shared));
    __syncthreads();
    const u32 begin = clock();
    const float sum =
        threadIdx.x / 128 < wgmma_warpgroups ? wgmma_rounds<kN, kFromRegisters>(desc) : ordinary_rounds<kKind>();
    const u32 end = clock();
    sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x % 128 == 0) clocks[blockIdx.x * 8 + threadIdx.x / 128] = end - begin;
}

template <u32 kN, bool kFromRegisters, Beside kKind>
void measure(const char* kind) {
    u32* clocks;
    float* sink;
    cudaMalloc(&clocks, 132 * 8 * sizeof(u32));
    cudaMalloc(&sink, 132 * 640 * sizeof(float));
    const auto kernel = run<kN, kFromRegisters, kKind>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    std::printf("N %2u, A from %s, %s: ", kN, kFromRegisters ? "registers" : "shared memory", kind);
    const u32 cases[][2] = {{1, 0}, {2, 0}, {4, 0}, {0, 1}, {1, 1}, {1, 3}, {3, 1}};
    for (const auto& [wgmma, ordinary] : cases) {
        for (u32 repeat = 0; repeat < 2; ++repeat)
            kernel<<<132, 128 * (wgmma + ordinary), 65536>>>(clocks, sink, wgmma);
        u32 host[8];
        cudaMemcpy(host, clocks, sizeof(host), cudaMemcpyDeviceToHost);
        std::printf(" %u+%u", wgmma, ordinary);
        if (wgmma) std::printf(" wgmmas %.0f", host[0] / double(kRounds));
        if (ordinary) std::printf(" others %.0f", host[wgmma] / double(kRounds));
    }
    std::printf("  (%s)\n", cudaGetErrorString(cudaGetLastError()));
    cudaFree(clocks);
    cudaFree(sink);
}

int main() {
    std::printf("clocks of a round: 4 wgmmas of each warpgroup + %u instructions of each warp of the others\n",
                kInstructions);
    measure<8, true, Beside::Lop3>("LOP3");
    measure<8, false, Beside::Lop3>("LOP3");
    measure<32, true, Beside::Lop3>("LOP3");
    measure<32, true, Beside::Prmt>("PRMT");
    measure<32, true, Beside::Ffma>("FFMA");
    measure<64, true, Beside::Lop3>("LOP3");
    measure<64, true, Beside::Ffma>("FFMA");
    measure<64, false, Beside::Ffma>("FFMA");
}
