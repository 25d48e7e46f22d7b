// Joining the experts' outputs: y[token] = sum of the token's combine slots in ascending slot order, in fp32 from zero,
// rounded to bf16 once. Slots without an expert are skipped, not multiplied by zero.
#pragma once

#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Combine {
    static constexpr u32 kLaneColumns = 8;
    static constexpr u32 kWarpColumns = kWarpSize * kLaneColumns;
    static constexpr u32 kSpans = ceil_div(kConfig.hidden, kWarpColumns);

    // Every math warp of the grid; `warp` counts them.
    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 warp, u32 num_warps) {
        const u32 items = min_of(Route<kConfig>::num_tokens(ctx), ctx.params.y_rows) * kSpans;
        for (u32 item = warp; item < items; item += num_warps) combine_span(ctx, item / kSpans, item % kSpans);
    }

private:
    static DM_DEVICE void combine_span(const Context<kConfig>& ctx, u32 token, u32 span) {
        constexpr u32 kTopk = kConfig.num_topk;
        const u32 lane = hw::lane_idx();
        const bool has_expert =
            lane < kTopk && Route<kConfig>::expert_of(ctx, token * kTopk + lane) < kConfig.num_experts;
        const u32 slots = hw::ballot(has_expert);
        const u32 column = span * kWarpColumns + lane * kLaneColumns;
        if (column >= kConfig.hidden) return;

        const u16* first = ctx.template own<BufferField::CombineSlots>() + token * u64(kConfig.hidden) + column;
        Vec16 values[kTopk];
        DM_UNROLL
        for (u32 k = 0; k < kTopk; ++k)
            if (slots >> k & 1)
                values[k] = hw::load(reinterpret_cast<const Vec16*>(
                    first + k * u64(kConfig.max_tokens_per_rank) * kConfig.hidden));
        float sum[kLaneColumns] = {};
        DM_UNROLL
        for (u32 k = 0; k < kTopk; ++k)
            if (slots >> k & 1)
                DM_UNROLL
                for (u32 i = 0; i < 4; ++i) {
                    sum[2 * i] = hw::add(sum[2 * i], hw::bits_float(values[k].w[i] << 16));
                    sum[2 * i + 1] = hw::add(sum[2 * i + 1], hw::bits_float(values[k].w[i] & 0xffff0000u));
                }
        Vec16 out;
        DM_UNROLL
        for (u32 i = 0; i < 4; ++i) out.w[i] = hw::pack_bf16x2(sum[2 * i], sum[2 * i + 1]);
        u8* y = static_cast<u8*>(ctx.params.y) + token * ctx.params.y_stride;
        hw::store(reinterpret_cast<Vec16*>(y + column * 2), out);
    }
};

}  // namespace deep_moe
