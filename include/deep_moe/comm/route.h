// Telling the owners what will come: each rank counts the rows it sends to every expert, writes the list of rows into
// its segment of every owner's SourceLists, ordered by local expert, and arrives at the owners.
//
// One warp of each of the first `parts` CTAs takes a stripe of the (token, slot) entries. Any routing fits: a segment
// holds as many entries as a rank can have, duplicates included.
#pragma once

#include "deep_moe/comm/arrivals.h"

namespace deep_moe {

constexpr u32 kMinEntriesPerPart = 256;  // below this another CTA costs more than it saves

template <MegaMoeConfig kConfig>
struct Route {
    static constexpr u32 kExperts = kConfig.num_experts;
    static constexpr u32 kLocal = kConfig.experts_per_rank();
    static constexpr u32 kSegment = kConfig.max_tokens_per_rank * kConfig.num_topk;

    // Warp-collective. False when the launch is to be abandoned.
    static DM_DEVICE bool run(const Context<kConfig>& ctx) {
        const u32 entries = ctx.num_tokens() * kConfig.num_topk;
        const u32 parts = max_of(1u, min_of(hw::grid_dim(), ceil_div(entries, kMinEntriesPerPart)));
        if (hw::block_idx() >= parts) return true;
        if (entries <= kWarpSize) return run_few(ctx, entries);
        const u32 stripe = ceil_div(entries, parts);
        const u32 begin = min_of(hw::block_idx() * stripe, entries);
        const u32 end = min_of(begin + stripe, entries);

        count(ctx, begin, end);
        ctx.trace.lap(TraceKind::Route);
        if (parts > 1) {
            reserve(ctx);
            if (!meet(ctx, parts)) return false;
        }
        ctx.trace.lap(TraceKind::WaitRouteCounts);
        place(ctx, parts);
        write_lists(ctx, begin, end);
        Arrivals<BufferField::CountFlags>::arrive(ctx, parts);
        ctx.trace.lap(TraceKind::Route);
        return true;
    }

    // Expert of an entry, or kExperts for none.
    static DM_DEVICE u32 expert_of(const Context<kConfig>& ctx, u32 entry) {
        return min_of(u32(hw::load(ctx.template own<BufferField::TopkIdx>() + entry)), kExperts);
    }

private:
    // What owners are told: this rank's segment of an owner's lists, and its count of rows for an expert.
    static DM_DEVICE u32* list_at(const Context<kConfig>& ctx, u32 owner) {
        return ctx.template peer<BufferField::SourceLists>(owner) + ctx.params.rank * u64(kSegment);
    }
    static DM_DEVICE u32* count_at(const Context<kConfig>& ctx, u32 expert) {
        return ctx.template peer<BufferField::RecvCounts>(expert / kLocal) + ctx.params.rank * kLocal + expert % kLocal;
    }

    // The same where every entry has a lane: expert by expert in ascending order, and so owner by owner. NOTES: 2 us of 70
    // for one token on two GPUs. The way below takes 8: ways through memory, and code that runs once and is not in the
    // instruction cache.
    static DM_DEVICE bool run_few(const Context<kConfig>& ctx, u32 entries) {
        const u32 entry = hw::lane_idx(), below = (1u << entry) - 1;
        u32* counts = next_of(ctx);
        DM_NO_UNROLL
        for (u32 e = entry; e < kExperts; e += kWarpSize) hw::store_shared(counts + e, 0u);
        hw::sync_warp();
        u32 left = entry < entries ? expert_of(ctx, entry) : kExperts, owner = 0, place = 0;
        for (;;) {
            const u32 expert = hw::min_of_lanes(left);
            if (expert == kExperts) break;
            if (expert / kLocal != owner) place = 0;
            owner = expert / kLocal;
            const u32 here = hw::ballot(left == expert);
            if (left == expert) {
                hw::store(list_at(ctx, owner) + place + hw::popcount(here & below), entry);
                left = kExperts;
            }
            if (entry == 0) hw::store_shared(counts + expert, hw::popcount(here));
            place += hw::popcount(here);
        }
        hw::sync_warp();
        DM_NO_UNROLL
        for (u32 e = entry; e < kExperts; e += kWarpSize)
            hw::store(count_at(ctx, e), hw::load_shared(counts + e));
        Arrivals<BufferField::CountFlags>::arrive(ctx, 1);
        ctx.trace.lap(TraceKind::Route);
        return true;
    }

    // u32 [E]: counts, then next positions; behind them u32 [E]: prefix sums. In the memory of the pipeline's stages, which
    // are not loaded before counts_ready.
    static DM_DEVICE u32* next_of(const Context<kConfig>& ctx) {
        static_assert(2 * kMaxExperts * sizeof(u32) <= stage_weight_bytes(kConfig));
        return ctx.template shared<SmemField::B, u32>();
    }

    // Calls visit(entry, expert) for the warp's entries that have an expert. Loads are issued in groups: one after the
    // other they would take most of the time until the first row can be pulled.
    template <typename Visit>
    static DM_DEVICE void for_each_entry(const Context<kConfig>& ctx, u32 begin, u32 end, Visit visit) {
        constexpr u32 kGroup = 8;
        DM_NO_UNROLL
        for (u32 base = begin + hw::lane_idx(); base < end; base += kGroup * kWarpSize) {
            u32 experts[kGroup];
            DM_UNROLL
            for (u32 j = 0; j < kGroup; ++j) {
                const u32 entry = base + j * kWarpSize;
                experts[j] = entry < end ? expert_of(ctx, entry) : kExperts;
            }
            DM_UNROLL
            for (u32 j = 0; j < kGroup; ++j)
                if (experts[j] < kExperts) visit(base + j * kWarpSize, experts[j]);
        }
    }

    // Counts the stripe.
    static DM_DEVICE void count(const Context<kConfig>& ctx, u32 begin, u32 end) {
        u32* next = next_of(ctx);
        DM_NO_UNROLL
        for (u32 e = hw::lane_idx(); e < kExperts; e += kWarpSize) hw::store_shared(next + e, 0u);
        hw::sync_warp();
        for_each_entry(ctx, begin, end, [&](u32, u32 expert) { hw::atomic_add_shared(next + expert, 1); });
        hw::sync_warp();
    }

    // Among other CTAs: `next` is then this one's first place within each expert.
    static DM_DEVICE void reserve(const Context<kConfig>& ctx) {
        u32* next = next_of(ctx);
        u32* send_counts = ctx.send_counts();
        DM_NO_UNROLL
        for (u32 e = hw::lane_idx(); e < kExperts; e += kWarpSize) {
            const u32 rows = hw::load_shared(next + e);
            if (rows != 0) hw::store_shared(next + e, hw::atomic_add_relaxed_gpu(send_counts + e, rows));
        }
        hw::sync_warp();
    }

    // All `parts` CTAs have arrived.
    static DM_DEVICE bool meet(const Context<kConfig>& ctx, u32 parts) {
        u32* arrivals = ctx.template own<BufferField::Header>()->count_arrivals + (ctx.epoch() & 1);
        bool ok = true;
        if (hw::lane_idx() == 0) {
            hw::atomic_add_acq_rel<hw::Scope::Gpu>(arrivals, 1);
            ok = wait_word<hw::Scope::Gpu>(ctx, WaitSite::RouteCounts, 0, arrivals, [&](u32 n) { return n == parts; });
        }
        hw::sync_warp();
        return hw::all_lanes(ok);
    }

    // Turns places within an expert into places within the owner's segment. The first CTA passes the counts on. A CTA that
    // routes alone has no need to ask memory for its own counts.
    static DM_DEVICE void place(const Context<kConfig>& ctx, u32 parts) {
        u32* next = next_of(ctx);
        u32* prefix = next + kExperts;
        const u32* send_counts = ctx.send_counts();
        u32 total = 0;
        DM_NO_UNROLL
        for (u32 base = 0; base < kExperts; base += kWarpSize) {
            const u32 e = base + hw::lane_idx();
            u32 rows = 0;
            if (e < kExperts) rows = parts == 1 ? hw::load_shared(next + e) : hw::load_relaxed<hw::Scope::Gpu>(send_counts + e);
            u32 sum = rows;
            for (u32 delta = 1; delta < kWarpSize; delta *= 2) {
                const u32 below = hw::shfl_up(sum, delta);
                if (hw::lane_idx() >= delta) sum += below;
            }
            if (e < kExperts) hw::store_shared(prefix + e, total + sum - rows);
            if (e < kExperts && hw::block_idx() == 0)
                hw::store(count_at(ctx, e), rows);
            total += hw::shfl(sum, kWarpSize - 1);
        }
        hw::sync_warp();
        DM_NO_UNROLL
        for (u32 e = hw::lane_idx(); e < kExperts; e += kWarpSize) {
            const u32 first = hw::load_shared(prefix + e / kLocal * kLocal);
            const u32 within = parts == 1 ? 0 : hw::load_shared(next + e);
            hw::store_shared(next + e, within + hw::load_shared(prefix + e) - first);
        }
        hw::sync_warp();
    }

    static DM_DEVICE void write_lists(const Context<kConfig>& ctx, u32 begin, u32 end) {
        u32* next = next_of(ctx);
        for_each_entry(ctx, begin, end, [&](u32 entry, u32 expert) {
            hw::store(list_at(ctx, expert / kLocal) + hw::atomic_add_shared(next + expert, 1), entry);
        });
    }
};

}  // namespace deep_moe
