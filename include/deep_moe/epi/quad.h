// The four lanes of a quad hold one accumulator row together, two columns each. Transposing 4 registers across the quad
// gives each lane 16 contiguous bytes, so that a tile leaves the registers in 16-byte stores without shared memory.
#pragma once

#include "deep_moe/hw/hw.h"

namespace deep_moe {

// Afterwards v[s] is what lane s of the quad had in v[this lane's number].
DM_DEVICE void transpose_quad(u32 (&v)[4]) {
    DM_UNROLL
    for (u32 bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (hw::lane_idx() & bit) != 0;
        DM_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const u32 received = hw::shfl_xor(upper ? v[i] : v[i | bit], bit);
            v[i] = upper ? received : v[i];
            v[i | bit] = upper ? v[i | bit] : received;
        }
    }
}

}  // namespace deep_moe
