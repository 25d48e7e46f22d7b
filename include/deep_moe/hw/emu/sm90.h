// Hopper warpgroup MMA, for the emulator. Names and meaning: hw/cuda/sm90.cuh.
//
// Between its issue and the wgmma_wait that retires it, an accumulator holds NaNs: reading it early shows. Registers of
// A are looked at again when it is retired, so their array must live until then.
#pragma once

#include "deep_moe/hw/emu/common.h"

namespace deep_moe::hw {

// A rank's launches follow each other.
DM_DEVICE void wait_for_predecessors() {}
DM_DEVICE void start_successor() {}

DM_DEVICE void wgmma_fence() { emu_collective(emu::Collective::WgmmaFence, 0, 0); }
DM_DEVICE void wgmma_commit() { emu_collective(emu::Collective::WgmmaCommit, 0, 0); }
template <u32 kPending>
DM_DEVICE void wgmma_wait() {
    emu_collective(emu::Collective::WgmmaWait, 0, kPending);
}

// Keeps the compiler from moving accesses of a register. The address of an accumulator escapes, which does it; that of
// A escapes no sooner than with its wgmma, and the fence before it looks there.
DM_DEVICE void wgmma_touch(float& /*reg*/) {}
DM_DEVICE void wgmma_touch(u32& reg) { asm volatile("" : "+m"(reg)); }

DM_DEVICE void emu_wgmma(const emu::WgmmaOperands& operands) {
    emu::ThreadHead* t = emu::self();
    t->api->wgmma(t, operands);
}
// D[64][N] (+)= A[64][32] * B[N][32]^T, e4m3 inputs, fp32 accumulators; A from shared memory or from registers.
template <u32 kN>
DM_DEVICE void wgmma_m64k32_e4m3(float (&d)[kN / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
    emu_wgmma({d, kN, nullptr, desc_a, desc_b, accumulate});
}
template <u32 kN>
DM_DEVICE void wgmma_m64k32_e4m3(float (&d)[kN / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
    emu_wgmma({d, kN, a, 0, desc_b, accumulate});
}

}  // namespace deep_moe::hw
