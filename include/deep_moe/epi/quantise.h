// Quantisation to e4m3 with one continuous fp32 scale per token and 128 channels.
//
// sf = amax / 448, q = e4m3(v * (448 / amax)), both divisions in fp32, amax at least 1e-10 so that zero rows divide.
// Power-of-two scales here cost a public port 6 points of GPQA.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/layout/weights.h"

namespace deep_moe {

constexpr float kLargestFloat = 3.402823466e38f;

struct GroupScale {
    float sf;       // what a quantised value is multiplied by to get back
    float inverse;  // what a value is multiplied by before rounding
};

DM_DEVICE GroupScale group_scale(float amax) {
    constexpr float kMaxE4m3 = 448.0f, kMinAmax = 1e-10f;
    amax = hw::max(amax, kMinAmax);
    return {hw::div(amax, kMaxE4m3), hw::div(kMaxE4m3, amax)};
}

// The same for values that still lack the row's top-k weight: it is a factor of all of them and goes into their scale.
DM_DEVICE GroupScale weighted_group_scale(float amax, float weight) {
    GroupScale scale = group_scale(hw::mul(amax, hw::abs(weight)));
    // Finite where the weight is, so that zeros stay zeros.
    const float limit = hw::max(kLargestFloat, hw::abs(weight));
    scale.inverse = hw::max_nan(hw::min_nan(hw::mul(scale.inverse, weight), limit), -limit);
    return scale;
}

// Stores e4m3 codes of 16 adjacent channels, the first a multiple of 16, where activations of the type have them.
template <MmaType kType>
DM_DEVICE void store_codes(u8* row, u32 channel, const Vec16& codes) {
    if constexpr (kType == MmaType::Fp8xMxfp4) DM_UNROLL
        for (u32 j = 0; j < 2; ++j)
            hw::store(reinterpret_cast<u64*>(row + activation_byte_of(kType, channel + 8 * j)),
                      u64(codes.w[2 * j + 1]) << 32 | codes.w[2 * j]);
    else
        hw::store(reinterpret_cast<Vec16*>(row + channel), codes);
}

}  // namespace deep_moe
