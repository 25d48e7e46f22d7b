// Joining the experts' outputs: y[token] = sum of the token's combine slots in ascending slot order, in fp32 from zero,
// rounded to bf16 once. Slots without an expert are skipped, not multiplied by zero.
//
// Slots are read and y is written once: neither may drive slots out of the L2 cache that are still to be read.
#pragma once

#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
class Combine {
public:
    // Every math warp of the grid; `warp` counts them. Loads what the first item needs besides its slots: before the
    // slots are complete there is time for it.
    DM_DEVICE Combine(const Context<kConfig>& ctx, u32 warp, u32 num_warps)
        : ctx_(ctx),
          items_(min_of(ctx.num_tokens(), ctx.params.y_rows) * kItemsPerToken),
          warp_(warp),
          num_warps_(num_warps),
          expert_(expert_of_lane(warp)) {}

    // Once the slots are complete.
    DM_DEVICE void run() {
        for (u32 item = warp_; item < items_; item += num_warps_) {
            const u32 slots = hw::ballot(expert_ < kConfig.num_experts);
            expert_ = expert_of_lane(item + num_warps_);  // arrives behind this item's loads
            combine(ctx_, item / kItemsPerToken, item % kItemsPerToken * kItemColumns, slots);
        }
    }

private:
    static constexpr u32 kTopk = kConfig.num_topk;
    static constexpr u32 kLaneColumns = 8;  // 16 bytes
    static constexpr u32 kSpanColumns = kWarpSize * kLaneColumns;
    // 16-byte loads per lane, so that an SM has 192 for every lane: fewer do not fill the memory's bandwidth.
    static constexpr u32 kLoadsInFlight = 192 / kConfig.math_warps();
    static constexpr u32 kSpans = max_of(1u, kLoadsInFlight / kTopk);  // of a work item
    static constexpr u32 kItemColumns = kSpans * kSpanColumns;
    static constexpr u32 kItemsPerToken = ceil_div(kConfig.hidden, kItemColumns);

    // Lane k: expert of the item's token in slot k, or num_experts for none.
    DM_DEVICE u32 expert_of_lane(u32 item) const {
        const u32 lane = hw::lane_idx();
        if (lane >= kTopk || item >= items_) return kConfig.num_experts;
        return Route<kConfig>::expert_of(ctx_, item / kItemsPerToken * kTopk + lane);
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

    const Context<kConfig>& ctx_;
    u32 items_, warp_, num_warps_;
    u32 expert_;  // of this lane's slot of the next item
};

}  // namespace deep_moe
