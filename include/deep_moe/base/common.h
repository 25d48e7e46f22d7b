// Integer types, function qualifiers and small constexpr math. The bottom of the include tree:
// no standard header, so that NVRTC compiles without any include path but ours.
#pragma once

#if defined(__CUDACC__) && !defined(DM_EMULATOR)
#define DM_HOST_DEVICE __host__ __device__ __forceinline__
#define DM_DEVICE __device__ __forceinline__
#define DM_UNROLL _Pragma("unroll")
#define DM_NO_UNROLL _Pragma("unroll 1")
#else
#define DM_HOST_DEVICE inline
#define DM_DEVICE inline __attribute__((always_inline))
#define DM_UNROLL
#define DM_NO_UNROLL
#endif

namespace deep_moe {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

constexpr u32 kWarpSize = 32;
constexpr u32 kWarpgroupSize = 128;

template <typename T>
DM_HOST_DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
DM_HOST_DEVICE constexpr T align_up(T a, T b) {
    return ceil_div(a, b) * b;
}

template <typename T>
DM_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
DM_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

// 16 bytes: the widest single load or store.
struct alignas(16) Vec16 {
    u32 w[4];
};

}  // namespace deep_moe
