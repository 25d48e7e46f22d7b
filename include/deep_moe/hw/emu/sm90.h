// Hopper warpgroup MMA, for the emulator. Names and meaning: hw/cuda/sm90.cuh.
//
// Between its issue and the wgmma_wait that retires it, an accumulator holds NaNs: reading it early shows.
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

// Keeps the compiler from moving accesses of an accumulator register; here the address of d escapes, which does it.
DM_DEVICE void wgmma_touch(float& /*reg*/) {}

// D[64][N] (+)= A[64][32] * B[N][32]^T, e4m3 inputs from shared memory, fp32 accumulators.
template <u32 kN>
DM_DEVICE void wgmma_m64k32_e4m3(float (&d)[kN / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
    emu::ThreadHead* t = emu::self();
    t->api->wgmma(t, d, kN, desc_a, desc_b, accumulate);
}

}  // namespace deep_moe::hw
