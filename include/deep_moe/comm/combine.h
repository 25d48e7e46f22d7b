// Joining the experts' outputs: y[token] = sum of the token's combine slots in ascending slot order, in fp32 from zero,
// rounded to bf16 once. Slots without an expert are skipped, not multiplied by zero.
//
// Slots are read and y is written once: neither may drive slots out of the L2 cache that are still to be read.
#pragma once

#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct Combine {
    static constexpr u32 kTopk = kConfig.num_topk;
    static constexpr u32 kLaneColumns = 8;  // 16 bytes
    static constexpr u32 kSpanColumns = kWarpSize * kLaneColumns;
    static constexpr u32 kLoadsInFlight = 24;  // 16-byte loads per lane: fewer do not fill the memory's bandwidth
    static constexpr u32 kSpans = max_of(1u, kLoadsInFlight / kTopk);  // of a work item
    static constexpr u32 kItemColumns = kSpans * kSpanColumns;
    static constexpr u32 kItemsPerToken = ceil_div(kConfig.hidden, kItemColumns);

    // Every math warp of the grid; `warp` counts them.
    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 warp, u32 num_warps) {
        const u32 items = min_of(Route<kConfig>::num_tokens(ctx), ctx.params.y_rows) * kItemsPerToken;
        u32 expert = expert_of_lane(ctx, warp, items);
        for (u32 item = warp; item < items; item += num_warps) {
            const u32 slots = hw::ballot(expert < kConfig.num_experts);
            expert = expert_of_lane(ctx, item + num_warps, items);  // arrives behind this item's loads
            combine(ctx, item / kItemsPerToken, item % kItemsPerToken * kItemColumns, slots);
        }
    }

private:
    // Lane k: expert of the item's token in slot k, or num_experts for none.
    static DM_DEVICE u32 expert_of_lane(const Context<kConfig>& ctx, u32 item, u32 items) {
        const u32 lane = hw::lane_idx();
        if (lane >= kTopk || item >= items) return kConfig.num_experts;
        return Route<kConfig>::expert_of(ctx, item / kItemsPerToken * kTopk + lane);
    }

    static DM_DEVICE void combine(const Context<kConfig>& ctx, u32 token, u32 first_column, u32 slots) {
        const u32 column = first_column + hw::lane_idx() * kLaneColumns;
        const u16* row = ctx.template own<BufferField::CombineSlots>() + token * u64(kConfig.hidden) + column;
        Vec16 values[kSpans][kTopk];
        DM_UNROLL
        for (u32 s = 0; s < kSpans; ++s)
            DM_UNROLL
            for (u32 k = 0; k < kTopk; ++k)
                if ((slots >> k & 1) && column + s * kSpanColumns < kConfig.hidden)
                    values[s][k] = hw::load_evict_first(reinterpret_cast<const Vec16*>(
                        row + k * u64(kConfig.max_tokens_per_rank) * kConfig.hidden + s * kSpanColumns));
        u16* y = reinterpret_cast<u16*>(static_cast<u8*>(ctx.params.y) + token * ctx.params.y_stride) + column;
        DM_UNROLL
        for (u32 s = 0; s < kSpans; ++s)
            if (column + s * kSpanColumns < kConfig.hidden)
                hw::store_evict_first(reinterpret_cast<Vec16*>(y + s * kSpanColumns), sum(values[s], slots));
    }

    static DM_DEVICE Vec16 sum(const Vec16 (&values)[kTopk], u32 slots) {
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
        return out;
    }
};

}  // namespace deep_moe
