// Staging: puts a rank's tokens into its symmetric buffer. One block per token, a warp for every 512 channels.
//
// Activations come as bf16 and are quantised (epi/quantise.h), or come quantised and are copied; either way they are
// stored in the order of the layer's weights (activation_byte_of). Expert ids are made
// int32, anything outside [0, E) becomes -1; top-k weights are multiplied by the routed scaling factor. Tokens at or
// beyond the count are not touched.
#pragma once

#include "deep_moe/epi/quantise.h"
#include "deep_moe/kernels/context.h"
#include "deep_moe/kernels/entry.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Stage {
    static constexpr u32 kHidden = kConfig.hidden;
    static constexpr u32 kGroups = kConfig.l1_k_blocks();
    // A warp's part of a token.
    static constexpr u32 kRounds = 2, kRoundChannels = kWarpSize * 8, kPartChannels = kRounds * kRoundChannels;

    static DM_DEVICE void run(const StageParams& params) {
        // In this order: what the next kernel finds must be what this one has written, not what the one before wrote.
        hw::wait_for_predecessors();
        hw::start_successor();
        const u32 count = num_tokens(params);
        if (hw::block_idx() == 0 && hw::thread_idx() == 0)
            hw::store(&buffer_field<kConfig, BufferField::Header>(params.buffer)->num_tokens, i32(count));
        const u32 warps = kStageThreads / kWarpSize;
        for (u32 t = hw::block_idx(); t < count; t += hw::grid_dim()) {
            if (hw::warp_idx() == warps - 1) route_token(params, t);
            for (u32 first = hw::warp_idx() * kPartChannels; first < kHidden; first += warps * kPartChannels)
                if (params.x_sf != nullptr)
                    copy_part(params, t, first);
                else
                    quantise_part(params, t, first);
        }
    }

private:
    static DM_DEVICE u32 num_tokens(const StageParams& params) {
        if (params.num_tokens == nullptr) return params.max_count;
        return min_of(u32(max_of(hw::load(params.num_tokens), 0)), params.max_count);
    }

    // Channels `first` and following; each half warp quantises groups of 128, 8 channels a lane. All loads are under way
    // before the first is used: with few tokens there is nothing else to wait for.
    static DM_DEVICE void quantise_part(const StageParams& params, u32 t, u32 first) {
        const u8* x = static_cast<const u8*>(params.x) + t * params.x_stride;
        u8* out = buffer_field<kConfig, BufferField::X>(params.buffer) + t * u64(kHidden);
        float* out_sf = buffer_field<kConfig, BufferField::XSf>(params.buffer) + t * u64(kGroups);
        const u32 lane_channel = first + hw::lane_idx() * 8;
        Vec16 raw[kRounds];
        DM_UNROLL
        for (u32 j = 0; j < kRounds; ++j) {
            const u32 channel = lane_channel + j * kRoundChannels;
            raw[j] = channel < kHidden ? hw::load(reinterpret_cast<const Vec16*>(x + channel * 2)) : Vec16{};
        }
        DM_UNROLL
        for (u32 j = 0; j < kRounds; ++j) {
            const u32 channel = lane_channel + j * kRoundChannels;
            float v[8], amax = 0.0f;
            DM_UNROLL
            for (u32 i = 0; i < 4; ++i) {
                v[2 * i] = hw::bits_float(raw[j].w[i] << 16);
                v[2 * i + 1] = hw::bits_float(raw[j].w[i] & 0xffff0000u);
                amax = hw::max(amax, hw::max(hw::abs(v[2 * i]), hw::abs(v[2 * i + 1])));
            }
            for (u32 mask = 1; mask < 16; mask *= 2) amax = hw::max(amax, hw::shfl_xor(amax, mask));
            const GroupScale scale = group_scale(amax);
            u32 packed[2];
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i)
                packed[i] = hw::pack_e4m3x2(hw::mul(v[4 * i], scale.inverse), hw::mul(v[4 * i + 1], scale.inverse)) |
                            hw::pack_e4m3x2(hw::mul(v[4 * i + 2], scale.inverse), hw::mul(v[4 * i + 3], scale.inverse)) << 16;
            if (channel >= kHidden) continue;
            hw::store(reinterpret_cast<u64*>(out + activation_byte_of(kConfig.mma_type, channel)),
                      u64(packed[1]) << 32 | packed[0]);
            if (channel % kScaleGroup == 0) hw::store(out_sf + channel / kScaleGroup, scale.sf);
        }
    }

    static DM_DEVICE void copy_part(const StageParams& params, u32 t, u32 first) {
        const u8* x = static_cast<const u8*>(params.x) + t * params.x_stride;
        u8* out = buffer_field<kConfig, BufferField::X>(params.buffer) + t * u64(kHidden);
        for (u32 i = first + hw::lane_idx() * 16; i < min_of(first + kPartChannels, kHidden); i += kWarpSize * 16) {
            const Vec16 codes = hw::load(reinterpret_cast<const Vec16*>(x + i));
            store_codes<kConfig.mma_type>(out, i, codes);
        }
        const float* sf = at<float>(params.x_sf, t * params.x_sf_stride);
        float* out_sf = buffer_field<kConfig, BufferField::XSf>(params.buffer) + t * u64(kGroups);
        const u32 group = first / kScaleGroup + hw::lane_idx();
        if (hw::lane_idx() < kPartChannels / kScaleGroup && group < kGroups) hw::store(out_sf + group, hw::load(sf + group));
    }

    static DM_DEVICE void route_token(const StageParams& params, u32 t) {
        const u32 k = hw::lane_idx();
        if (k >= kConfig.num_topk) return;
        const u64 row = t * params.topk_idx_stride;
        const i64 id = params.topk_idx_is_i64 ? hw::load(at<i64>(params.topk_idx, row) + k)
                                              : i64(hw::load(at<i32>(params.topk_idx, row) + k));
        const bool valid = id >= 0 && id < i64(kConfig.num_experts);
        const float weight = hw::load(at<float>(params.topk_weights, t * params.topk_weights_stride) + k);
        const u32 entry = t * kConfig.num_topk + k;
        hw::store(buffer_field<kConfig, BufferField::TopkIdx>(params.buffer) + entry, valid ? i32(id) : -1);
        hw::store(buffer_field<kConfig, BufferField::TopkWeights>(params.buffer) + entry,
                  hw::mul(weight, params.routed_scaling_factor));
    }

    template <typename T>
    static DM_DEVICE const T* at(const void* base, u64 bytes) {
        return reinterpret_cast<const T*>(static_cast<const u8*>(base) + bytes);
    }
};

}  // namespace deep_moe

// The argument is a MegaMoeConfig expression in parentheses.
#define DM_DEFINE_STAGE_KERNEL(config)                                                                      \
    DM_ENTRY(stage, deep_moe::kStageThreads, (DM_ARGUMENT(deep_moe::StageParams, params)),                  \
             (deep_moe::Stage<config>::run(DM_ARGUMENT_REF(params))), deep_moe::buffer_layout_hash(config), \
             0, deep_moe::kStageThreads, deep_moe::u64(deep_moe::KernelKind::Stage))
