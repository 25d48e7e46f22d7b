// Several ranks, few tokens: until the counts of all ranks are there, memory has nothing to do for 10 us. Experts of this
// rank that its own tokens name will have rows, whatever the others send; some of their weights come into the L2 cache
// meanwhile.
//
// NOTES: 16 MiB make one token on two GPUs 2.5 us faster (70.7), 32 MiB 3. Where more will be touched than is loaded
// evict-first (as far as this rank's own tokens tell), as with two tokens, they cost 1 to 3 %: what has been fetched is
// gone before it is used.
#pragma once

#include "deep_moe/comm/route.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
struct EarlyWeights {
    // One warp of every CTA, before counts_ready.
    static DM_DEVICE void prefetch(const Context<kConfig>& ctx) {
        const u32 entries = ctx.num_entries();
        if (kConfig.num_ranks == 1 || !loads_evict_first(kConfig, entries)) return;
        u32 left = kLocal;  // this lane's expert, while it is neither another rank's nor done with
        if (hw::lane_idx() < entries) {
            const u32 expert = Route<kConfig>::expert_of(ctx, hw::lane_idx());
            if (expert / kLocal == ctx.params.rank) left = expert % kLocal;
        }
        for (u64 budget = kBudget; budget > 0;) {
            const u32 expert = hw::min_of_lanes(left);
            if (expert == kLocal) return;
            if (left == expert) left = kLocal;
            const u64 bytes = min_of(budget, l1_weight_bytes(kConfig));
            const u8* from = ctx.params.l1_weights + expert * l1_weight_bytes(kConfig);
            for (u64 at = u64(hw::block_idx() * kWarpSize + hw::lane_idx()) * kPiece; at < bytes;
                 at += u64(hw::grid_dim() * kWarpSize) * kPiece)
                hw::bulk_prefetch(from + at, u32(min_of(u64(kPiece), bytes - at)));
            budget -= bytes;
        }
    }

private:
    static constexpr u32 kLocal = kConfig.experts_per_rank();
    static constexpr u32 kPiece = 4096;
    static constexpr u64 kBudget = u64(16) << 20;
};

}  // namespace deep_moe
