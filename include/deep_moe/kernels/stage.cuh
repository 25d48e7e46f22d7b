// Staging: puts a rank's tokens into its symmetric buffer. One warp per token.
//
// Activations come as bf16 and are quantised (epi/quantise.h), or come quantised and are copied. Expert ids are made
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

    static DM_DEVICE void run(const StageParams& params) {
        // In this order: what the next kernel finds must be what this one has written, not what the one before wrote.
        hw::wait_for_predecessors();
        hw::start_successor();
        const u32 count = num_tokens(params);
        if (hw::block_idx() == 0 && hw::thread_idx() == 0)
            hw::store(&buffer_field<kConfig, BufferField::Header>(params.buffer)->num_tokens, i32(count));
        const u32 warps = kStageThreads / kWarpSize;
        for (u32 t = hw::block_idx() * warps + hw::warp_idx(); t < count; t += hw::grid_dim() * warps) {
            if (params.x_sf != nullptr)
                copy_token(params, t);
            else
                quantise_token(params, t);
            route_token(params, t);
        }
    }

private:
    static DM_DEVICE u32 num_tokens(const StageParams& params) {
        if (params.num_tokens == nullptr) return params.max_count;
        return min_of(u32(max_of(hw::load(params.num_tokens), 0)), params.max_count);
    }

    // Each half warp quantises a group of 128 channels, 8 channels a lane.
    static DM_DEVICE void quantise_token(const StageParams& params, u32 t) {
        const u8* x = static_cast<const u8*>(params.x) + t * params.x_stride;
        u8* out = buffer_field<kConfig, BufferField::X>(params.buffer) + t * u64(kHidden);
        float* out_sf = buffer_field<kConfig, BufferField::XSf>(params.buffer) + t * u64(kGroups);
        const u32 half_lane = hw::lane_idx() % 16;
        for (u32 base = 0; base < kGroups; base += 2) {
            const u32 group = base + hw::lane_idx() / 16;
            const u32 channel = group * kScaleGroup + half_lane * 8;
            const bool valid = channel < kHidden;
            Vec16 raw{};
            if (valid) raw = hw::load(reinterpret_cast<const Vec16*>(x + channel * 2));
            float v[8], amax = 0.0f;
        DM_UNROLL
            for (u32 i = 0; i < 4; ++i) {
                v[2 * i] = hw::bits_float(raw.w[i] << 16);
                v[2 * i + 1] = hw::bits_float(raw.w[i] & 0xffff0000u);
                amax = hw::max(amax, hw::max(hw::abs(v[2 * i]), hw::abs(v[2 * i + 1])));
            }
            for (u32 mask = 1; mask < 16; mask *= 2) amax = hw::max(amax, hw::shfl_xor(amax, mask));
            const GroupScale scale = group_scale(amax);
            u32 packed[2];
            DM_UNROLL
            for (u32 i = 0; i < 2; ++i)
                packed[i] = hw::pack_e4m3x2(hw::mul(v[4 * i], scale.inverse), hw::mul(v[4 * i + 1], scale.inverse)) |
                            hw::pack_e4m3x2(hw::mul(v[4 * i + 2], scale.inverse), hw::mul(v[4 * i + 3], scale.inverse)) << 16;
            if (valid) hw::store(reinterpret_cast<u64*>(out + channel), u64(packed[1]) << 32 | packed[0]);
            if (valid && half_lane == 0) hw::store(out_sf + group, scale.sf);
        }
    }

    static DM_DEVICE void copy_token(const StageParams& params, u32 t) {
        const u8* x = static_cast<const u8*>(params.x) + t * params.x_stride;
        u8* out = buffer_field<kConfig, BufferField::X>(params.buffer) + t * u64(kHidden);
        for (u32 i = hw::lane_idx() * 16; i < kHidden; i += kWarpSize * 16)
            hw::store(reinterpret_cast<Vec16*>(out + i), hw::load(reinterpret_cast<const Vec16*>(x + i)));
        const float* sf = at<float>(params.x_sf, t * params.x_sf_stride);
        float* out_sf = buffer_field<kConfig, BufferField::XSf>(params.buffer) + t * u64(kGroups);
        for (u32 i = hw::lane_idx(); i < kGroups; i += kWarpSize) hw::store(out_sf + i, hw::load(sf + i));
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
