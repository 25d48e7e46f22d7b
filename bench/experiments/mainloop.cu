// How fast can one CTA per SM run 128x256x128 FP8 K blocks with promotion to fp32 every 128 of K, without a fused layer
// around it? By math variant, and by how the operands are loaded.
//
//   nvcc -std=c++20 --expt-relaxed-constexpr -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude \
//        bench/experiments/mainloop.cu -o /tmp/mainloop && /tmp/mainloop
//
// One H200, random data, us for 1.72 TFLOP (a range: from single launches after a pause to 40 back to back):
//   loads only                           plain TMA 890 (11 TB/s from L2), with two small copies of scales a stage 780,
//                                        weights as one bulk copy of 32 KB 815, weights multicast to a pair of CTAs 726
//   n128 pieces, one buffer: the kernel  plain 1140-1165 (1480-1510 TFLOPS), with copies of scales 1200-1260,
//                                        weights multicast 1225-1245; in clocks a K block, as a variant that runs later
//                                        meets a lower clock rate: plain or bulk copies 1168, stages of a pair of CTAs
//                                        released together 1256, weights multicast 1245: the waiting costs, not the
//                                        multicast
//     issued in turns (ping-pong)        1226-1258
//     x from registers (ldmatrix)        1310
//     64 rows                            720-800, for half of the work
//   n64 pieces, two buffers              not measured in this form; one that ptxas serialised (C7514) took 1760, with x
//                                        from registers 1700
//   n256 chain, no promotion             1070-1090 (1600 TFLOPS)
// So promotion costs the kernel's mainloop about 7 %, and no other way of loading makes it faster. On zeros n128 takes
// 1000 us at 1.8 GHz: with random data the chip is at its power limit, at about 1.5 GHz.
#include <cudaTypedefs.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "deep_moe/hw/hw.h"
#include "deep_moe/mma/promote.h"

using namespace deep_moe;

constexpr u32 kM = 51200, kN = 4096, kK = 4096, kExperts = 32;
constexpr u32 kTileM = 128, kTileN = 256, kColumnTiles = kN / kTileN, kTiles = kM / kTileM * kColumnTiles;
constexpr u32 kKBlocks = kK / kBlockK, kMmas = kBlockK / kMmaK;
constexpr u32 kXBytes = kTileM * kBlockK, kWBytes = kTileN * kBlockK;
constexpr u32 kWScales = 4;  // of a block: two are used, 16 bytes are the least that can be copied
constexpr u32 kDepth = 4, kThreads = 384, kSms = 132;

enum class Math { None, N128, N128Turns, N128RegisterX, N128Rows64, N64, N64RegisterX, N256Chain };
enum class Loads { Plain, Scales, BulkWeights, Together, Multicast };  // the last two: pairs of CTAs

struct Inputs {
    TensorMap x_map, w_map, w_half_map;  // boxes of 128 rows of x, 256 and 128 rows of w
    const u8* w;
    const float *x_scales, *w_scales;
};

struct Shared {
    u8 x[kDepth][kXBytes], w[kDepth][kWBytes];
    float x_scales[kDepth][kTileM], w_scales[kDepth][kWScales];
    u64 full[kDepth], empty[kDepth];
};

struct Clock {
    u64 cycles, ns;
};

struct Place {  // in the ring of stages
    u32 stage, parity;
    DM_DEVICE void advance() {
        if (++stage == kDepth) stage = 0, parity ^= 1;
    }
};

DM_DEVICE void wait(u64* barriers, Place place) {
    while (!hw::mbarrier_try_wait(barriers + place.stage, place.parity)) {
    }
}

struct Tile {
    u32 m, n, expert;
};

// 8 row tiles go through all columns of an expert together: neighbours share weights, and the rows stay in L2.
DM_DEVICE Tile tile_of(u32 t) {
    constexpr u32 kRows = 8, kRun = kRows * kColumnTiles;
    return {t / kRun * kRows + t % kRows, t % kRun / kRows, t / kRun % kExperts};
}

template <Loads kLoads>
DM_DEVICE void load_x(const Inputs& in, Shared& shared, Tile tile, u32 block, u32 stage) {
    constexpr u32 kScaleBytes = kLoads == Loads::Scales ? sizeof(shared.x_scales[0]) : 0;
    u64* full = shared.full + stage;
    hw::mbarrier_arrive_expect_tx(full, kXBytes + kScaleBytes);
    if constexpr (kScaleBytes != 0)
        hw::bulk_load(shared.x_scales[stage], in.x_scales + (tile.m * kKBlocks + block) * kTileM, kScaleBytes, full);
    hw::tma_load_2d(shared.x[stage], &in.x_map, block * kBlockK, tile.m * kTileM, full);
}

template <Loads kLoads>
DM_DEVICE void load_w(const Inputs& in, Shared& shared, Tile tile, u32 block, u32 stage) {
    constexpr u32 kScaleBytes = kLoads == Loads::Scales ? sizeof(shared.w_scales[0]) : 0;
    const u64 index = (tile.expert * kColumnTiles + tile.n) * kKBlocks + block;
    const u32 k = block * kBlockK, row = tile.n * kTileN;
    u64* full = shared.full + stage;
    hw::mbarrier_arrive_expect_tx(full, kWBytes + kScaleBytes);
    if constexpr (kScaleBytes != 0)
        hw::bulk_load(shared.w_scales[stage], in.w_scales + index * kWScales, kScaleBytes, full);
    if constexpr (kLoads == Loads::BulkWeights ||
                  kLoads == Loads::Together) {  // as if the weights lay in memory block by block
        hw::bulk_load(shared.w[stage], in.w + index * kWBytes, kWBytes, full);
    } else if constexpr (kLoads == Loads::Multicast) {  // each CTA of the pair loads half, for both
        const u32 rank = hw::cluster_rank();
        hw::tma_load_3d_multicast(shared.w[stage] + rank * kWBytes / 2, &in.w_half_map, k, row + rank * kTileN / 2,
                                  tile.expert, full, 0b11);
    } else {
        hw::tma_load_3d(shared.w[stage], &in.w_map, k, row, tile.expert, full);
    }
}

// One thread for x, one for w.
template <Loads kLoads, bool kW>
DM_DEVICE void load(const Inputs& in, Shared& shared) {
    Place place{0, 1};
    for (u32 t = blockIdx.x; t < kTiles; t += gridDim.x)
        for (u32 block = 0; block < kKBlocks; ++block, place.advance()) {
            wait(shared.empty, place);
            if constexpr (kW)
                load_w<kLoads>(in, shared, tile_of(t), block, place.stage);
            else
                load_x<kLoads>(in, shared, tile_of(t), block, place.stage);
        }
}

// A warpgroup that multiplies: 64 rows of x by 256 rows of w.
struct Consumer {
    Shared& shared;
    u32 ctas, group, first_row, lane = hw::lane_idx(), warp_row = hw::warp_idx() % 4 * 16;
    u64 x_base = swizzle128_descriptor(hw::shared_address(shared.x[0] + first_row * kBlockK));
    u64 w_base = swizzle128_descriptor(hw::shared_address(shared.w[0]));
    Place place{0, 0};

    // All CTAs that load into the stage must know.
    DM_DEVICE void release(u32 stage) {
        hw::sync_warp();
        if (ctas == 1) {
            if (lane == 0) hw::mbarrier_arrive(shared.empty + stage);
        } else if (lane < ctas) {
            hw::mbarrier_arrive_cluster(shared.empty + stage, lane);
        }
    }
    DM_DEVICE PieceScales scales() const {
        const float* x = shared.x_scales[place.stage] + first_row + warp_row + lane / 4;
        const float* w = shared.w_scales[place.stage];
        return {{x[0] * w[0], x[8] * w[0]}, {x[0] * w[1], x[8] * w[1]}};
    }
    DM_DEVICE u64 w_rows(u32 row) const {
        return advance_descriptor(advance_descriptor(w_base, place.stage * kWBytes), row * kBlockK);
    }

    // Turns of the two warpgroups in issuing: each has a named barrier, where the other one arrives to pass the turn.
    DM_DEVICE void take_turn() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
    DM_DEVICE void pass_turn() const { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }
};

// x as an operand from shared memory.
struct SharedX {
    u64 descriptor;
    DM_DEVICE explicit SharedX(const Consumer& c) : descriptor(advance_descriptor(c.x_base, c.place.stage * kXBytes)) {}

    template <u32 kColumns>
    DM_DEVICE void multiply(float (&d)[kColumns / 2], u32 k, u64 w, bool accumulate) const {
        hw::wgmma_m64k32_e4m3<kColumns>(d, advance_descriptor(descriptor, k * kMmaK), w, accumulate);
    }
};

// x as an operand from registers: a warp's 16 rows.
struct RegisterX {
    u32 a[kMmas][4];
    DM_DEVICE explicit RegisterX(const Consumer& c) {
        const u32 row = c.first_row + c.warp_row + c.lane % 16;
        const u32 address = hw::shared_address(c.shared.x[c.place.stage] + row * kBlockK);
        DM_UNROLL
        for (u32 k = 0; k < kMmas; ++k)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                         : "r"(address + ((k * 2 + c.lane / 16) ^ row % 8) * 16)
                         : "memory");
    }

    template <u32 kColumns>
    DM_DEVICE void multiply(float (&d)[kColumns / 2], u32 k, u64 w, bool accumulate) const {
        hw::wgmma_m64k32_e4m3<kColumns>(d, a[k], w, accumulate);
    }
};

template <u32 kColumns, class X>
DM_DEVICE void issue(float (&d)[kColumns / 2], const X& x, u64 w, bool accumulate = false) {
    DM_UNROLL
    for (u32 i = 0; i < kColumns / 2; ++i) hw::wgmma_touch(d[i]);
    hw::wgmma_fence();
    DM_UNROLL
    for (u32 k = 0; k < kMmas; ++k)
        x.template multiply<kColumns>(d, k, advance_descriptor(w, k * kMmaK), accumulate || k != 0);
    hw::wgmma_commit();
}

template <u32 kRegisters>
DM_DEVICE void promote(float* sum, float (&partial)[kRegisters], const PieceScales& scales) {
    DM_UNROLL
    for (u32 i = 0; i < kRegisters; ++i) hw::wgmma_touch(partial[i]);
    DM_UNROLL
    for (u32 i = 0; i < kRegisters; ++i)
        sum[i] = hw::fma(partial[i], (i / 4 % 2 == 0 ? scales.even : scales.odd)[i / 2 % 2], sum[i]);
}

// Pieces of 128 columns with one buffer: the other warpgroup multiplies while this one promotes.
template <Math kMath, class X>
DM_DEVICE void pieces_n128(Consumer& c, float (&sum)[128]) {
    constexpr bool kTurns = kMath == Math::N128Turns, kRows64 = kMath == Math::N128Rows64;
    DM_NO_UNROLL
    for (u32 block = 0; block < kKBlocks; ++block, c.place.advance()) {
        wait(c.shared.full, c.place);
        const X x(c);
        const PieceScales scales = c.scales();
        DM_UNROLL
        for (u32 p = 0; p < (kRows64 ? 1 : 2); ++p) {
            float partial[64];
            if constexpr (kTurns) c.take_turn();
            issue<128>(partial, x, c.w_rows((kRows64 ? c.group : p) * 128));
            if constexpr (kTurns) c.pass_turn();
            hw::wgmma_wait<0>();
            if (kRows64 || p == 1) c.release(c.place.stage);
            promote(sum + p * 64, partial, scales);
        }
    }
}

// Pieces of 64 columns with two buffers: a piece is promoted while the next one is multiplied, across K blocks too.
// NOTES: ptxas (CUDA 13.0) serialises the wgmmas (C7514) if a path through the loop lacks a wait.
DM_DEVICE void pieces_n64(Consumer& c, float (&sum)[128]) {
    float first[32], second[32];
    wait(c.shared.full, c.place);
    issue<64>(first, SharedX(c), c.w_rows(0));
    DM_NO_UNROLL
    for (u32 block = 0; block < kKBlocks; ++block) {
        const SharedX x(c);
        const PieceScales scales = c.scales();
        issue<64>(second, x, c.w_rows(64));
        hw::wgmma_wait<1>();
        promote(sum, first, scales);
        issue<64>(first, x, c.w_rows(128));
        hw::wgmma_wait<1>();
        promote(sum + 32, second, scales);
        issue<64>(second, x, c.w_rows(192));
        hw::wgmma_wait<1>();
        promote(sum + 64, first, scales);
        const u32 stage = c.place.stage;
        c.place.advance();
        if (block + 1 < kKBlocks) {
            wait(c.shared.full, c.place);
            issue<64>(first, SharedX(c), c.w_rows(0));
            hw::wgmma_wait<1>();
        } else {
            hw::wgmma_wait<0>();
        }
        c.release(stage);
        promote(sum + 96, second, scales);
    }
}

// The same with x from registers: they are read by the last piece, so that nothing is in flight between K blocks.
DM_DEVICE void pieces_n64_register_x(Consumer& c, float (&sum)[128]) {
    DM_NO_UNROLL
    for (u32 block = 0; block < kKBlocks; ++block, c.place.advance()) {
        wait(c.shared.full, c.place);
        const RegisterX x(c);
        const PieceScales scales = c.scales();
        float buffer[2][32];
        issue<64>(buffer[0], x, c.w_rows(0));
        DM_UNROLL
        for (u32 p = 1; p < 4; ++p) {
            issue<64>(buffer[p % 2], x, c.w_rows(p * 64));
            hw::wgmma_wait<1>();
            promote(sum + (p - 1) * 32, buffer[(p - 1) % 2], scales);
        }
        hw::wgmma_wait<0>();
        c.release(c.place.stage);
        promote(sum + 96, buffer[1], scales);
    }
}

// Accumulates in the tensor core over all of K; or only waits for the loads.
template <Math kMath>
DM_DEVICE void chain_n256(Consumer& c, float (&sum)[128]) {
    DM_NO_UNROLL
    for (u32 block = 0; block < kKBlocks; ++block, c.place.advance()) {
        wait(c.shared.full, c.place);
        if constexpr (kMath != Math::None) {
            issue<256>(sum, SharedX(c), c.w_rows(0), true);
            hw::wgmma_wait<0>();
        }
        c.release(c.place.stage);
    }
}

template <Math kMath, u32 kCtas>
DM_DEVICE float multiply(Shared& shared, u32 group) {
    constexpr bool kRegisterX = kMath == Math::N128RegisterX || kMath == Math::N64RegisterX;
    using X = std::conditional_t<kRegisterX, RegisterX, SharedX>;
    Consumer c{shared, kCtas, group, kMath == Math::N128Rows64 ? 0 : group * 64};
    if (kMath == Math::N128Turns && group == 1) c.pass_turn();
    float total = 0;
    for (u32 t = blockIdx.x; t < kTiles; t += gridDim.x) {
        float sum[128] = {};
        if constexpr (kMath == Math::None || kMath == Math::N256Chain) chain_n256<kMath>(c, sum);
        else if constexpr (kMath == Math::N64) pieces_n64(c, sum); else if constexpr (kMath == Math::N64RegisterX) pieces_n64_register_x(c, sum);
        else pieces_n128<kMath, X>(c, sum);
        DM_UNROLL
        for (u32 i = 0; i < 128; ++i) total += sum[i];
    }
    if (kMath == Math::N128Turns && group == 0) c.take_turn();  // the last one passed
    return total;
}

template <Math kMath, Loads kLoads>
__global__ void __launch_bounds__(kThreads, 1)
    mainloop(const __grid_constant__ Inputs in, float* totals, Clock* clock) {
    constexpr u32 kCtas = kLoads >= Loads::Together ? 2 : 1;
    Shared& shared = *reinterpret_cast<Shared*>(hw::shared_memory());
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kDepth; ++i) {
            hw::mbarrier_init(shared.full + i, 2);
            hw::mbarrier_init(shared.empty + i, 8 * kCtas);
        }
        hw::fence_mbarrier_init();
    }
    if constexpr (kLoads != Loads::Scales) {
        for (u32 i = threadIdx.x; i < kDepth * kTileM; i += kThreads) shared.x_scales[0][i] = 1;
        for (u32 i = threadIdx.x; i < kDepth * kWScales; i += kThreads) shared.w_scales[0][i] = 1;
    }
    const u32 start_cycles = hw::clock();
    const u64 start_ns = hw::timer_ns();
    hw::sync_block();
    if constexpr (kCtas > 1) hw::sync_cluster();
    const u32 warp = hw::warp_idx();
    if (warp < 4) {
        hw::lower_max_registers<24>();
        if (warp == 0 && hw::lane_idx() == 0) load<kLoads, false>(in, shared);
        if (warp == 1 && hw::lane_idx() == 0) load<kLoads, true>(in, shared);
    } else {
        hw::raise_max_registers<240>();
        totals[blockIdx.x * kThreads + threadIdx.x] = multiply<kMath, kCtas>(shared, warp / 4 - 1);
    }
    if constexpr (kCtas > 1) hw::sync_cluster();
    if (blockIdx.x == 0 && threadIdx.x == 0) *clock = {hw::clock() - start_cycles, hw::timer_ns() - start_ns};
}

// e4m3 of any sign and mantissa with binomial exponents, or zeros.
__global__ void fill(u8* data, u32 bytes, u32 seed, bool random) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * blockDim.x) {
        u32 x = (i + seed) * 2654435761u;
        x = (x ^ x >> 15) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        x ^= x >> 16;
        data[i] = random ? u8((x & 0x87) | (6 + hw::popcount(x & 0xff00)) << 3) : 0;
    }
}

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    printf("CUDA error: %s\n", cudaGetErrorString(error));
    exit(1);
}

template <class T>
T* allocate(size_t count) {
    T* data;
    check(cudaMalloc(&data, count * sizeof(T)));
    check(cudaMemset(data, 0x3f, count * sizeof(T)));  // as floats: 0.75
    return data;
}

// Boxes of box_rows x 128 bytes with the 128-byte swizzle.
TensorMap encode(u8* data, u32 rank, u64 rows, u32 box_rows) {
    void* entry;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    const cuuint64_t dims[] = {kK, rows, kExperts}, strides[] = {kK, rows * kK};
    const cuuint32_t box[] = {kBlockK, box_rows, 1}, element_strides[] = {1, 1, 1};
    TensorMap map;
    const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry)(
        reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, data, dims, strides, box,
        element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue);
    return map;
}

struct Variant {
    const char* name;
    void (*kernel)(Inputs, float*, Clock*);
    u32 ctas;
    double tflop;
};

template <Math kMath, Loads kLoads = Loads::Plain>
Variant variant(const char* name) {
    const double share = kMath == Math::None ? 0 : kMath == Math::N128Rows64 ? 0.5 : 1;
    return {name, mainloop<kMath, kLoads>, kLoads >= Loads::Together ? 2u : 1u, share * 2e-12 * kM * kN * kK};
}

void measure(const Variant& variant, const Inputs& in, float* totals, Clock* clock) {
    check(cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension};
    cluster.val.clusterDim = {variant.ctas, 1, 1};
    cudaLaunchConfig_t config{kSms, kThreads, sizeof(Shared)};
    config.attrs = &cluster;
    config.numAttrs = variant.ctas > 1;
    cudaEvent_t start, end;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&end));
    auto microseconds = [&](int launches) {
        cudaEventRecord(start);
        for (int i = 0; i < launches; ++i) check(cudaLaunchKernelEx(&config, variant.kernel, in, totals, clock));
        cudaEventRecord(end);
        check(cudaDeviceSynchronize());
        float ms;
        check(cudaEventElapsedTime(&ms, start, end));
        return 1e3 * ms / launches;
    };
    auto print = [&](const char* kind, double us) {
        const double mhz = 1e3 * double(clock->cycles) / double(clock->ns);
        printf(" | %s %6.1f us %4.0f TFLOPS %4.0f MHz", kind, us, variant.tflop / us * 1e6, mhz);
    };
    microseconds(2);  // warm-up
    double single = 1e9;
    for (int i = 0; i < 5; ++i) {
        const timespec pause{0, 3'000'000};
        nanosleep(&pause, nullptr);
        single = std::min(single, microseconds(1));
    }
    printf("%-36s", variant.name);
    print("single", single);
    print("sustained", microseconds(40));
    printf("\n");
}

int main() {
    const Variant variants[] = {
        variant<Math::None>("loads only"),
        variant<Math::None, Loads::Scales>("loads only, with scales"),
        variant<Math::None, Loads::BulkWeights>("loads only, weights as bulk copies"),
        variant<Math::None, Loads::Multicast>("loads only, weights multicast"),
        variant<Math::N128>("n128"),
        variant<Math::N128, Loads::Scales>("n128, with scales"),
        variant<Math::N128, Loads::BulkWeights>("n128, weights as bulk copies"),
        variant<Math::N128, Loads::Together>("n128, the same, stages of a pair released together"),
        variant<Math::N128, Loads::Multicast>("n128, weights multicast"),
        variant<Math::N128Turns>("n128 in turns"),
        variant<Math::N128RegisterX>("n128, x from registers"),
        variant<Math::N128Rows64>("n128, 64 rows"),
        variant<Math::N64>("n64, two buffers"),
        variant<Math::N64RegisterX>("n64, two buffers, x from registers"),
        variant<Math::N256Chain>("n256 chain"),
    };
    constexpr u32 kInputBytes = kM * kK, kWeightBytes = kExperts * kN * kK;
    u8 *x = allocate<u8>(kInputBytes), *w = allocate<u8>(kWeightBytes);
    const float* x_scales = allocate<float>(kM * kKBlocks);
    const float* w_scales = allocate<float>(kExperts * kColumnTiles * kKBlocks * kWScales);
    const Inputs in{encode(x, 2, kM, kTileM), encode(w, 3, kN, kTileN), encode(w, 3, kN, kTileN / 2), w, x_scales,
                    w_scales};
    float* totals = allocate<float>(kSms * kThreads);
    Clock* clock;
    check(cudaMallocHost(&clock, sizeof(Clock)));
    for (bool random : {true, false}) {
        printf("%s\n", random ? "random data" : "zeros");
        fill<<<1024, 256>>>(x, kInputBytes, 1, random);
        fill<<<1024, 256>>>(w, kWeightBytes, 0x9e3779b9u, random);
        for (const Variant& variant : variants) measure(variant, in, totals, clock);
    }
}
