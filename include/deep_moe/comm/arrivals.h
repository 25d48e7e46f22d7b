// The two moments when all ranks wait for all CTAs of all ranks: the counts and lists are there, the slots are written.
// Every rank has a word for every rank (CountFlags, DoneFlags): epoch in the upper half, a message in the lower one. A
// rank's CTAs count in its own word for itself; its first CTA waits for the last of them and then tells the others.
//
// NOTES: 132 CTAs that each add to a word of another GPU take 3 us longer than one that stores there for them.
#pragma once

#include "deep_moe/comm/wait.h"

namespace deep_moe {

template <BufferField kWords>
struct Arrivals {
    // One warp of each of `count` CTAs, the first one among them. What the CTA has written is visible with its arrival.
    template <MegaMoeConfig kConfig>
    static DM_DEVICE void arrive(const Context<kConfig>& ctx, u32 count) {
        hw::sync_warp();
        u64* word = ctx.template own<kWords>() + ctx.params.rank;
        // All together advance the upper half by one, with the last arrival.
        const u64 part = hw::block_idx() == 0 ? (u64(1) << 32) - (count - 1) : 1;
        if (hw::lane_idx() == 0) hw::add_release<scope<kConfig>()>(word, part);
    }

    // Warps of every CTA, exactly one of the first CTA with `tells`. All ranks must have the same message. False when
    // the launch is to be abandoned.
    template <MegaMoeConfig kConfig>
    static DM_DEVICE bool wait(const Context<kConfig>& ctx, WaitSite site, bool tells, u32 message = 0) {
        const u32 self = ctx.params.rank;
        bool ok = hw::lane_idx() != 0 || wait_rank(ctx, site, self, 0);
        hw::sync_warp();
        ok = hw::all_lanes(ok);
        if constexpr (kConfig.num_ranks > 1) {
            if (ok && tells) {
        DM_NO_UNROLL
                for (u32 rank = hw::lane_idx(); rank < kConfig.num_ranks; rank += kWarpSize)
                    if (rank != self)
                        hw::store_release_sys(ctx.template peer<kWords>(rank) + self,
                                              u64(ctx.epoch()) << 32 | message);
            }
            DM_NO_UNROLL
            for (u32 rank = hw::lane_idx(); rank < kConfig.num_ranks; rank += kWarpSize)
                ok = ok && (rank == self || wait_rank(ctx, site, rank, message));
            hw::sync_warp();
            ok = hw::all_lanes(ok);
        }
        return ok;
    }

private:
    // What one rank alone has written it reads alone.
    template <MegaMoeConfig kConfig>
    static DM_DEVICE constexpr hw::Scope scope() {
        return kConfig.num_ranks == 1 ? hw::Scope::Gpu : hw::Scope::Sys;
    }

    template <MegaMoeConfig kConfig>
    static DM_DEVICE bool wait_rank(const Context<kConfig>& ctx, WaitSite site, u32 rank, u32 message) {
        const u32 epoch = ctx.epoch();
        u64 word = 0;
        const bool ok =
            wait_word<scope<kConfig>()>(ctx, site, rank, ctx.template own<kWords>() + rank, [&word, epoch](u64 seen) {
                word = seen;
                return u32(seen >> 32) == epoch;
            });
        if (!ok || u32(word) == message) return ok;
        raise_abort(ctx, AbortCode::BoundMismatch, site, rank);
        check_abort(ctx);
        return false;
    }
};

}  // namespace deep_moe
