// Pulling rows: the owner copies every row it was sent from the source's staged input into the ring pool (few rows of one
// rank alone stay where they are: comm/direct_rows.h).
//
// Rows are numbered through the local experts in ascending order; within an expert, source by source, starting with
// this rank, so that at any time different owners pull from different sources. Pulling warp w of the grid takes rows
// w, w + warps, ...: early blocks are complete first. With two row buffers one row arrives in shared memory while
// another is stored. A row is published before the warp waits for the ring slot of the next one: otherwise the
// tile that must free the slot could wait for that row.
#pragma once

#include "deep_moe/comm/lone_rank.h"

namespace deep_moe {

struct PulledRow {
    u32 source;
    u32 entry;  // token * K + slot at the source
    u32 block;
    u32 row_in_block;
};

// Finds the source of a row. Lane i holds the counts of the i-th source in this rank's order.
template <MegaMoeConfig kConfig>
class RowCursor {
public:
    DM_DEVICE explicit RowCursor(const Context<kConfig>& ctx) : ctx_(ctx) {
        DM_UNROLL
        for (u32 j = 0; j < kGroups; ++j) list_base_[j] = source_rows_[j] = 0;
    }

    // Moves to row `row` (ascending). Warp-collective. False past the last row.
    DM_DEVICE bool seek(u32 row) {
        while (row >= first_row_ + expert_rows_) {
            if (next_ == ctx_.num_touched()) return false;
            enter_next_expert();
        }
        position_ = row - first_row_;
        return true;
    }

    // Warp-collective.
    DM_DEVICE PulledRow locate() const {
        PulledRow row{};
        row.block = first_block_ + position_ / kConfig.block_m;
        row.row_in_block = position_ % kConfig.block_m;
        if (LoneRank<kConfig>::applies(ctx_)) {
            row.entry = LoneRank<kConfig>::entry_of(ctx_, expert_, position_);
            return row;
        }
        u32 below = 0;
        bool found = false;
        DM_UNROLL
        for (u32 j = 0; j < kGroups; ++j) {
            u32 end = source_rows_[j];
            for (u32 delta = 1; delta < kWarpSize; delta *= 2) {
                const u32 lower = hw::shfl_up(end, delta);
                if (hw::lane_idx() >= delta) end += lower;
            }
            end += below;
            const u32 behind = hw::ballot(position_ < end);
            if (!found && behind != 0) {
                found = true;
                const u32 lane = hw::lowest_bit(behind);
                const u32 index = list_base_[j] + position_ - (end - source_rows_[j]);
                row.source = source_of(j * kWarpSize + lane);
                row.entry = hw::shfl(index, lane);
            }
            below = hw::shfl(end, kWarpSize - 1);
        }
        row.entry = hw::load(ctx_.template own<BufferField::SourceLists>() + row.source * u64(kSegment) + row.entry);
        return row;
    }

private:
    static constexpr u32 kGroups = ceil_div(kConfig.num_ranks, kWarpSize);
    static constexpr u32 kSegment = kConfig.max_tokens_per_rank * kConfig.num_topk;

    DM_DEVICE u32 source_of(u32 i) const { return (ctx_.params.rank + i) % kConfig.num_ranks; }

    DM_DEVICE void enter_next_expert() {
        first_row_ += expert_rows_;
        first_block_ += ceil_div(expert_rows_, kConfig.block_m);
        expert_ = ctx_.touched_expert(next_++);
        expert_rows_ = ctx_.expert_rows(expert_);
        DM_UNROLL
        for (u32 j = 0; j < kGroups; ++j) {
            const u32 i = j * kWarpSize + hw::lane_idx();
            list_base_[j] += source_rows_[j];
            source_rows_[j] = i < kConfig.num_ranks ? rows_of(source_of(i)) : 0;
        }
    }

    DM_DEVICE u32 rows_of(u32 source) const {
        const u32 before = source == 0 ? 0 : hw::load_shared(ctx_.recv_rows(source - 1, expert_));
        return hw::load_shared(ctx_.recv_rows(source, expert_)) - before;
    }

    const Context<kConfig>& ctx_;
    u32 next_ = 0, expert_ = 0, expert_rows_ = 0;  // next_: in the list of touched experts
    u32 first_row_ = 0, first_block_ = 0;
    u32 position_ = 0;
    u32 source_rows_[kGroups], list_base_[kGroups];
};

template <MegaMoeConfig kConfig>
struct Pull {
    // The pulling warps of every CTA; `warp` counts them within the CTA. False when the launch is to be abandoned.
    static DM_DEVICE bool run(const Context<kConfig>& ctx, u32 warp) {
        hw::fence_proxy_async();  // peers staged their rows with ordinary stores; bulk copies read them
        const u32 stride = hw::grid_dim() * kConfig.pull_warps();
        RowCursor<kConfig> cursor(ctx);
        if constexpr (kBuffers == 1) {  // fewer registers
            u32 number = 0;
            for (u32 i = hw::block_idx() * kConfig.pull_warps() + warp; cursor.seek(i); i += stride, ++number) {
                const Request row = request(ctx, cursor.locate(), warp, number);
                if (!deliver(ctx, row, warp, number)) return drain(ctx, warp, number, number + 1);
                ctx.trace.lap(TraceKind::Pull, row.row.block);
            }
            return true;
        }
        Request row{}, next{};             // the oldest under way, and the one behind it
        u32 requested = 0, delivered = 0;  // row n uses buffer n % kBuffers, whose barrier is then in phase n / kBuffers
        for (u32 i = hw::block_idx() * kConfig.pull_warps() + warp;; i += stride) {
            const bool more = cursor.seek(i);
            while (delivered < requested && (!more || requested - delivered == kBuffers)) {
                if (!deliver(ctx, row, warp, delivered)) return drain(ctx, warp, delivered, requested);
                ctx.trace.lap(TraceKind::Pull, row.row.block);
                ++delivered;
                row = next;
            }
            if (!more) return true;
            next = request(ctx, cursor.locate(), warp, requested++);
            if (requested - delivered == 1) row = next;
        }
    }

private:
    static constexpr u32 kBuffers = row_buffers(kConfig);
    static constexpr u32 kKBlocks = kConfig.l1_k_blocks(), kScalesPerLane = ceil_div(kKBlocks, kWarpSize);

    // A row whose values are on their way to shared memory, and what else belongs to it.
    struct Request {
        PulledRow row;
        float weight;
        float scales[kScalesPerLane];  // of K blocks lane, lane + 32, ...
    };

    static DM_DEVICE u8* row_buffer(const Context<kConfig>& ctx, u32 warp, u32 number) {
        return ctx.template shared<SmemField::RowBuffer, u8>() +
               (warp * kBuffers + number % kBuffers) * align_up(kConfig.hidden, 128u);
    }

    static DM_DEVICE Request request(const Context<kConfig>& ctx, const PulledRow& row, u32 warp, u32 number) {
        const u64 token = row.entry / kConfig.num_topk;
        if (hw::elect_one()) {
            u64* barrier = ctx.barrier(row_barrier(ctx, warp, number));
            hw::mbarrier_arrive_expect_tx(barrier, kConfig.hidden);
            hw::bulk_load(row_buffer(ctx, warp, number),
                          ctx.template peer<BufferField::X>(row.source) + token * kConfig.hidden, kConfig.hidden,
                          barrier);
        }
        Request requested{row, hw::load(ctx.template peer<BufferField::TopkWeights>(row.source) + row.entry), {}};
        const float* x_sf = ctx.template peer<BufferField::XSf>(row.source) + token * kKBlocks;
        DM_UNROLL
        for (u32 j = 0; j < kScalesPerLane; ++j) {
            const u32 kb = j * kWarpSize + hw::lane_idx();
            if (kb < kKBlocks) requested.scales[j] = hw::load(x_sf + kb);
        }
        return requested;
    }

    // After a failed wait: a copy must not be under way into the shared memory of a CTA that has left. Returns false.
    static DM_DEVICE bool drain(const Context<kConfig>& ctx, u32 warp, u32 begin, u32 end) {
        for (u32 i = begin; i < end; ++i) wait_barrier(ctx, row_barrier(ctx, warp, i), i / kBuffers % 2);
        return false;
    }

    static DM_DEVICE u32 row_barrier(const Context<kConfig>& ctx, u32 warp, u32 number) {
        return ctx.barriers().row(warp, number % kBuffers);
    }

    // Stores the row, its scales and its meta data into the pool and publishes it.
    static DM_DEVICE bool deliver(const Context<kConfig>& ctx, const Request& request, u32 warp, u32 number) {
        const PulledRow& row = request.row;
        if (!wait_ring_slot(ctx, row.block)) return false;
        const u32 ring_slot = row.block % kConfig.ring_blocks();
        const u32 pool_row = ring_slot * kConfig.block_m + row.row_in_block;
        if (hw::elect_one()) {
            wait_barrier(ctx, row_barrier(ctx, warp, number), number / kBuffers % 2);
            hw::bulk_store(ctx.template own<BufferField::L1Pool>() + pool_row * u64(kConfig.hidden),
                           row_buffer(ctx, warp, number), kConfig.hidden);
            hw::bulk_commit();
            hw::store(ctx.template own<BufferField::RowMeta>() + pool_row,
                      row_meta(kConfig, row.source, row.entry, request.weight));
        }
        float* pool_sf = ctx.template own<BufferField::L1PoolSf>() + u64(ring_slot) * kKBlocks * kConfig.block_m;
        DM_UNROLL
        for (u32 j = 0; j < kScalesPerLane; ++j) {
            const u32 kb = j * kWarpSize + hw::lane_idx();
            if (kb < kKBlocks) hw::store(pool_sf + kb * kConfig.block_m + row.row_in_block, request.scales[j]);
        }
        if (hw::elect_one()) hw::bulk_wait<0>();
        hw::sync_warp();
        if (hw::lane_idx() == 0) hw::add_release_gpu(ctx.template block_counters<BufferField::RowsArrived>() + row.block, 1);
        return true;
    }

    // The block that held this ring slot before has been read for the last time.
    static DM_DEVICE bool wait_ring_slot(const Context<kConfig>& ctx, u32 block) {
        if (block < kConfig.ring_blocks()) return true;
        const u32 previous = block - kConfig.ring_blocks();
        ctx.trace.lap(TraceKind::Pull, block);
        bool ok = true;
        if (hw::lane_idx() == 0)
            ok = wait_word<hw::Scope::Gpu>(ctx, WaitSite::RingSlot, previous,
                                           ctx.template block_counters<BufferField::L2Done>() + previous,
                                           [](u32 n) { return n == kConfig.l2_n_tiles(); });
        ctx.trace.lap(TraceKind::WaitRingSlot, previous);
        hw::fence_proxy_async();  // the slot's last row was written and read by bulk copies, and so is the next one
        hw::sync_warp();
        return hw::all_lanes(ok);
    }
};

}  // namespace deep_moe
