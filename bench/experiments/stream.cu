// How fast can one launch stream weights through shared memory, and what does the launch itself cost? No math: one thread
// of each CTA fills a ring of stages by bulk copies, another one empties it at once. Cold L2, CUDA events, as in mega.py.
//
//   nvcc -O3 -std=c++17 -arch=sm_90a -o stream stream.cu && ./stream
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#define CHECK(call)                                                    \
    do {                                                               \
        cudaError_t error = (call);                                    \
        if (error != cudaSuccess) {                                    \
            std::printf("%s: %s\n", #call, cudaGetErrorString(error)); \
            std::exit(1);                                              \
        }                                                              \
    } while (0)

struct Plan {
    const uint8_t* data;
    uint64_t bytes;
    uint32_t tile_bytes;  // what a CTA reads before it takes its next tile, round robin
    uint32_t stage_bytes;
    uint32_t stages;
    uint32_t copies;  // bulk copies per stage
    uint32_t policy;  // L2: 0 normal, 1 evict-first, 2 unchanged
};

__device__ uint32_t smem_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nloop: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra loop;\n}" ::"r"(
            smem_address(barrier)),
        "r"(parity)
        : "memory");
}

__global__ void __launch_bounds__(384, 1) stream(const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ uint64_t full[32], empty[32];
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < plan.stages; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_address(full + i)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_address(empty + i)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    uint64_t policy;
    if (plan.policy == 1)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    const uint32_t per_tile = plan.tile_bytes / plan.stage_bytes;
    const uint64_t tiles = plan.bytes / plan.tile_bytes;
    uint32_t slot = 0, phase = 0;
    const bool produces = threadIdx.x == 0, consumes = threadIdx.x == 32;
    if (!produces && !consumes) return;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (uint32_t i = 0; i < per_tile; ++i) {
            if (produces) {
                wait(empty + slot, phase ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(full + slot)),
                             "r"(plan.stage_bytes));
                const uint32_t part = plan.stage_bytes / plan.copies;
                for (uint32_t c = 0; c < plan.copies; ++c) {
                    const uint32_t to = smem_address(smem + slot * plan.stage_bytes + c * part);
                    const uint8_t* from =
                        plan.data + tile * plan.tile_bytes + uint64_t(i) * plan.stage_bytes + c * part;
                    if (plan.policy == 0)
                        asm volatile(
                            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                                "r"(to),
                            "l"(from), "r"(part), "r"(smem_address(full + slot))
                            : "memory");
                    else
                        asm volatile(
                            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                            "[%1], "
                            "%2, [%3], %4;" ::"r"(to),
                            "l"(from), "r"(part), "r"(smem_address(full + slot)), "l"(policy)
                            : "memory");
                }
            } else {
                wait(full + slot, phase);
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(empty + slot)) : "memory");
            }
            if (++slot == plan.stages) slot = 0, phase ^= 1;
        }
    }
}

__global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

int main() {
    const uint64_t size = 2048ull << 20;
    uint8_t *data, *flush;
    CHECK(cudaMalloc(&data, size));
    CHECK(cudaMalloc(&flush, 256 << 20));
    CHECK(cudaMemset(data, 1, size));
    CHECK(cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, 224 << 10));
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    auto time = [&](uint32_t grid, const Plan& plan) {
        std::vector<float> samples;
        for (int i = 0; i < 13; ++i) {
            CHECK(cudaMemsetAsync(flush, i, 256 << 20));
            spin<<<1, 1>>>(200000);
            CHECK(cudaEventRecord(start));
            stream<<<grid, 384, 224 << 10>>>(plan);
            CHECK(cudaEventRecord(stop));
            CHECK(cudaDeviceSynchronize());
            float ms;
            CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (i >= 2) samples.push_back(ms * 1e3f);
        }
        std::sort(samples.begin(), samples.end());
        return samples[samples.size() / 2];
    };
    std::printf("nothing: %.1f us\n", time(132, {data, 0, 1 << 20, 32768, 5, 1, 0}));
    std::printf("%8s %4s %8s %8s %6s %6s %6s %8s %8s\n", "bytes", "grid", "tile KB", "stage KB", "stages", "copies",
                "policy", "us", "GB/s");
    auto row = [&](uint32_t grid, uint64_t bytes, uint32_t tile, uint32_t stage, uint32_t stages, uint32_t copies,
                   uint32_t policy) {
        const float us = time(grid, {data, bytes, tile << 10, stage << 10, stages, copies, policy});
        std::printf("%5u MB %4u %8u %8u %6u %6u %6u %8.1f %8.0f\n", unsigned(bytes >> 20), grid, tile, stage, stages,
                    copies, policy, us, bytes / us / 1e3);
    };
    for (uint64_t mb : {96, 144, 624, 768}) {
        const uint64_t bytes = mb << 20;
        for (uint32_t policy : {0, 1, 2}) {
            row(132, bytes, 1024, 32, 5, 1, policy);
            row(132, bytes, 128, 32, 6, 1, policy);
            row(132, bytes, 32, 32, 6, 1, policy);
            row(96, bytes, 1024, 32, 5, 1, policy);
        }
        row(132, bytes, 1024, 32, 3, 1, 0);
        row(132, bytes, 1024, 16, 13, 1, 0);
        row(132, bytes, 1024, 32, 6, 4, 0);
    }
    return 0;
}
