// Hopper warpgroup MMA. All functions are collective over a warpgroup (128 threads).
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::hw {

// Programmatic dependent launch: a kernel may be started before the one in front of it in its stream has ended. Until
// this returns it must not touch memory that earlier kernels use; behind it, they have all ended.
DM_DEVICE void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may be started, when every CTA has said so or has ended.
DM_DEVICE void start_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Orders register and shared-memory accesses before the next wgmma.
DM_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DM_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 kPending>
DM_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of an accumulator register, or of A's, across wgmma instructions.
DM_DEVICE void wgmma_touch(float& reg) { asm volatile("" : "+f"(reg)::"memory"); }
DM_DEVICE void wgmma_touch(u32& reg) { asm volatile("" : "+r"(reg)::"memory"); }

// D[64][N] (+)= A[64][32] * B[N][32]^T, e4m3 inputs from shared memory, fp32 accumulators.
// d[(n / 8) * 4 + i]: row = warp * 16 + lane / 4 + (i / 2) * 8, column = n + (lane % 4) * 2 + i % 2.
// The tensor core keeps about 14 bits while it accumulates.
template <u32 kN>
DM_DEVICE void wgmma_m64k32_e4m3(float (&d)[kN / 2], u64 desc_a, u64 desc_b, bool accumulate);

// The same with A from registers. As for D, a wgmma_fence must lie between writing them and this, and they must keep
// their values until the wgmma_wait that retires it. Of the warp's 16 rows, four bytes along K each, lowest k first:
// a[0]: row = lane / 4, k = lane % 4 * 4; a[1]: row + 8; a[2]: k + 16; a[3]: row + 8, k + 16.
// NOTES: PTX shows this layout in a figure only (m64nNk32, matrix A); the text of mma.m16n8k32 gives the same formulas.
template <u32 kN>
DM_DEVICE void wgmma_m64k32_e4m3(float (&d)[kN / 2], const u32 (&a)[4], u64 desc_b, bool accumulate);

// The registers of D, as operands of the asm statement and as their names in its text. They come first in both lists.
#define DM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DM_D8(i) DM_D4(i), DM_D4(i + 4)
#define DM_D12(i) DM_D8(i), DM_D4(i + 8)
#define DM_D16(i) DM_D8(i), DM_D8(i + 8)
#define DM_D32(i) DM_D16(i), DM_D16(i + 16)
#define DM_D64(i) DM_D32(i), DM_D32(i + 32)
#define DM_D128(i) DM_D64(i), DM_D64(i + 64)
#define DM_D4_NAMES "%0, %1, %2, %3"
#define DM_D8_NAMES DM_D4_NAMES ", %4, %5, %6, %7"
#define DM_D12_NAMES DM_D8_NAMES ", %8, %9, %10, %11"
#define DM_D16_NAMES DM_D8_NAMES ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DM_D32_NAMES DM_D16_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DM_D64_NAMES                                                                   \
    DM_D32_NAMES                                                                       \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DM_D128_NAMES                                                                              \
    DM_D64_NAMES                                                                                   \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define DM_WGMMA_TEXT(n, registers, a, b, accumulate) \
    "{ .reg .pred p; setp.ne.b32 p, " accumulate      \
    ", 0; "                                           \
    "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" DM_D##registers##_NAMES "}, " a ", " b ", p, 1, 1; }"

// Both forms for one N. i0 to i5: the numbers of the operands behind D; i0 is how many registers D has.
#define DM_WGMMA(n, i0, i1, i2, i3, i4, i5)                                                              \
    template <>                                                                                          \
    DM_DEVICE void wgmma_m64k32_e4m3<n>(float (&d)[i0], u64 desc_a, u64 desc_b, bool accumulate) {       \
        asm volatile(DM_WGMMA_TEXT(n, i0, "%" #i0, "%" #i1, "%" #i2)                                     \
                     : DM_D##i0(0)                                                                       \
                     : "l"(desc_a), "l"(desc_b), "r"(u32(accumulate)));                                  \
    }                                                                                                    \
    template <>                                                                                          \
    DM_DEVICE void wgmma_m64k32_e4m3<n>(float (&d)[i0], const u32(&a)[4], u64 desc_b, bool accumulate) { \
        asm volatile(DM_WGMMA_TEXT(n, i0, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", "%" #i4, "%" #i5)  \
                     : DM_D##i0(0)                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(u32(accumulate)));   \
    }

DM_WGMMA(8, 4, 5, 6, 7, 8, 9)
DM_WGMMA(16, 8, 9, 10, 11, 12, 13)
DM_WGMMA(24, 12, 13, 14, 15, 16, 17)
DM_WGMMA(32, 16, 17, 18, 19, 20, 21)
DM_WGMMA(64, 32, 33, 34, 35, 36, 37)
DM_WGMMA(128, 64, 65, 66, 67, 68, 69)
DM_WGMMA(256, 128, 129, 130, 131, 132, 133)

#undef DM_WGMMA
#undef DM_WGMMA_TEXT
#undef DM_D4
#undef DM_D4_NAMES
#undef DM_D8
#undef DM_D8_NAMES
#undef DM_D12
#undef DM_D12_NAMES
#undef DM_D16
#undef DM_D16_NAMES
#undef DM_D32
#undef DM_D32_NAMES
#undef DM_D64
#undef DM_D64_NAMES
#undef DM_D128
#undef DM_D128_NAMES

}  // namespace deep_moe::hw
