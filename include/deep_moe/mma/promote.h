// One K block of a warpgroup's tile: partial sums of exactly 128 of K in the tensor core, promoted to fp32 registers.
//
// Hopper's FP8 tensor cores keep about 14 bits while they accumulate: a chain over all of K loses up to a third of the
// magnitude of a layer on same-sign data. Partials of 128 added in fp32 are accurate to a few 1e-4, and 128 is also the
// reach of a scale. The order is part of the numerical contract: acc = fma(partial, x_sf * w_sf, acc), K ascending.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/mma/descriptor.h"

namespace deep_moe {

constexpr u32 kPieceN = 128;                  // columns of one partial
constexpr u32 kPieceRegisters = kPieceN / 2;  // per thread
constexpr u32 kMmaK = 32;

// Combined scales of a thread's two rows for accumulator chunks (8 columns) of even and odd number.
struct PieceScales {
    float even[2], odd[2];
};

DM_DEVICE void multiply_piece(float (&partial)[kPieceRegisters], u64 desc_a, u64 desc_b) {
    DM_UNROLL
    for (u32 i = 0; i < kPieceRegisters; ++i) hw::wgmma_touch(partial[i]);
    hw::wgmma_fence();
    DM_UNROLL
    for (u32 k = 0; k < kBlockK; k += kMmaK)
        hw::wgmma_m64k32_e4m3<kPieceN>(partial, advance_descriptor(desc_a, k), advance_descriptor(desc_b, k), k != 0);
    hw::wgmma_commit();
}

DM_DEVICE void promote_piece(float (&sum)[kPieceRegisters], float (&partial)[kPieceRegisters],
                             const PieceScales& scales) {
    DM_UNROLL
    for (u32 i = 0; i < kPieceRegisters; ++i) hw::wgmma_touch(partial[i]);
    DM_UNROLL
    for (u32 i = 0; i < kPieceRegisters; ++i) {
        const u32 row = i / 2 % 2;
        sum[i] = hw::fma(partial[i], i / 4 % 2 == 0 ? scales.even[row] : scales.odd[row], sum[i]);
    }
}

}  // namespace deep_moe
