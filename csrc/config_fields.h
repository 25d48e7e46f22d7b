// The fields of MegaMoeConfig by name, visited once for the constructor, the properties and the literal.
#pragma once

#include <string>

#include "deep_moe/layout/config.h"

namespace deep_moe {

template <typename Visitor>
void visit_config_fields(Visitor&& visit) {
    visit("num_ranks", &MegaMoeConfig::num_ranks);
    visit("num_experts", &MegaMoeConfig::num_experts);
    visit("num_topk", &MegaMoeConfig::num_topk);
    visit("hidden", &MegaMoeConfig::hidden);
    visit("intermediate", &MegaMoeConfig::intermediate);
    visit("max_tokens_per_rank", &MegaMoeConfig::max_tokens_per_rank);
    visit("ring_rows", &MegaMoeConfig::ring_rows);
    visit("decoded_slots", &MegaMoeConfig::decoded_slots);
    visit("mma_type", &MegaMoeConfig::mma_type);
    visit("activation", &MegaMoeConfig::activation);
    visit("bias", &MegaMoeConfig::bias);
    visit("bound_class", &MegaMoeConfig::bound_class);
    visit("block_m", &MegaMoeConfig::block_m);
    visit("lag_blocks", &MegaMoeConfig::lag_blocks);
    visit("unit_blocks", &MegaMoeConfig::unit_blocks);
    visit("decode_ahead", &MegaMoeConfig::decode_ahead);
    visit("trace_events", &MegaMoeConfig::trace_events);
}

inline std::string literal_of(u32 value) { return std::to_string(value); }
inline std::string literal_of(bool value) { return value ? "true" : "false"; }

inline std::string literal_of(MmaType value) {
    switch (value) {
        case MmaType::Fp8xFp8: return "deep_moe::MmaType::Fp8xFp8";
        case MmaType::Fp8xMxfp4: return "deep_moe::MmaType::Fp8xMxfp4";
    }
    return "deep_moe::MmaType(" + std::to_string(u32(value)) + ")";
}

inline std::string literal_of(Activation value) {
    switch (value) {
        case Activation::SwiGLU: return "deep_moe::Activation::SwiGLU";
        case Activation::SwiGLUOai: return "deep_moe::Activation::SwiGLUOai";
    }
    return "deep_moe::Activation(" + std::to_string(u32(value)) + ")";
}

// C++ source text of a configuration, with designated initialisers.
inline std::string config_literal(const MegaMoeConfig& config) {
    std::string text;
    visit_config_fields([&](const char* name, auto member) {
        text += (text.empty() ? "deep_moe::MegaMoeConfig{." : ", .") + std::string(name) + " = " +
                literal_of(config.*member);
    });
    return text + "}";
}

}  // namespace deep_moe
