// From a channel's gate and up to one value, in fp32. NaN stays NaN.
//
// Activation::SwiGLU     silu(gate) * up
// Activation::SwiGLUOai  gate * sigmoid(alpha * gate) * (up + 1), of gpt-oss (openai/gpt-oss, torch/model.py)
//
// Before it the expert's biases are added, then gate and up clamped. Zeros give zero: padded channels stay zero.
#pragma once

#include "deep_moe/epi/quantise.h"

namespace deep_moe {

DM_DEVICE void clamp_pair(float& gate, float& up, float limit) {
    gate = hw::min_nan(gate, limit);
    up = hw::max_nan(hw::min_nan(up, limit), -limit);
}

template <Activation kActivation>
DM_DEVICE float activated(float gate, float up, float alpha) {
    constexpr bool kIsOai = kActivation == Activation::SwiGLUOai;
    constexpr float kLog2e = 1.4426950408889634f;
    const float slope = kIsOai ? hw::mul(alpha, -kLog2e) : -kLog2e;
    const float sigmoid = hw::rcp_approx(hw::add(1.0f, hw::exp2_approx(hw::mul(gate, slope))));
    return hw::mul(hw::mul(gate, sigmoid), kIsOai ? hw::add(up, 1.0f) : up);
}

}  // namespace deep_moe
