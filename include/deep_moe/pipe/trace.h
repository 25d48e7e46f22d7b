// Recording what a warp does. `ctx.trace` is one Tracer per thread; the lane 0 of a traced warp writes, and in a kernel
// without trace_events nothing is left of it.
//
// lap(kind) ends the span that began at the lap before, so a hook is one line behind the code that it measures.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/layout/params.h"
#include "deep_moe/layout/trace.h"
#include "deep_moe/sched/task_order.h"

namespace deep_moe {

static_assert(u32(TracePhase::L1) == u32(TaskKind::L1) && u32(TracePhase::None) == u32(TaskKind::End));

template <MegaMoeConfig kConfig, bool kEnabled = (kConfig.trace_events > 0)>
class Tracer {
public:
    DM_DEVICE explicit Tracer(const MegaMoeParams&) {}
    DM_DEVICE void lap(TraceKind, u32 = 0) const {}
    DM_DEVICE void lap(TraceKind, const TileTask&) const {}
    DM_DEVICE void finish() const {}
    struct Stall {};
    DM_DEVICE Stall stall() const { return {}; }
};

template <MegaMoeConfig kConfig>
class Tracer<kConfig, true> {
public:
    DM_DEVICE explicit Tracer(const MegaMoeParams& params) : params_(params) {
        if (!records()) return;
        const u64 now = hw::timer_ns();
        hw::store(&header()->begin_clock, hw::clock());
        hw::store(&header()->begin_ns, now);
        last_ = u32(now);
    }

    // Ends a span; the next one begins.
    DM_DEVICE void lap(TraceKind kind, u32 argument = kNoArgument) const { record(kind, TracePhase::None, argument); }
    DM_DEVICE void lap(TraceKind kind, const TileTask& task) const {
        const bool is_tile = task.kind == TaskKind::L1 || task.kind == TaskKind::L2;
        record(kind, is_tile ? TracePhase(task.kind) : TracePhase::None, trace_tile(task.block, task.n_tile));
    }

    // Lives as long as a wait inside a span; in SM clocks, since it may be shorter than a step of the timer.
    class Stall {
    public:
        DM_DEVICE explicit Stall(const Tracer& tracer) : tracer_(tracer), begin_(hw::clock()) {}
        DM_DEVICE ~Stall() { tracer_.stalled_ += hw::clock() - begin_; }

    private:
        const Tracer& tracer_;
        u32 begin_;
    };
    DM_DEVICE Stall stall() const { return Stall(*this); }

    // At the end of the warp's work.
    DM_DEVICE void finish() const {
        if (!records()) return;
        const u64 now = hw::timer_ns();
        hw::store(&header()->end_clock, hw::clock());
        hw::store(&header()->end_ns, now);
        hw::store(&header()->recorded, count_);
        hw::store(&header()->bound_class, kConfig.bound_class);
    }

private:
    DM_DEVICE static u32 slot() { return trace_slot(hw::thread_idx() / kWarpSize); }
    DM_DEVICE static bool records() { return hw::lane_idx() == 0 && slot() != kNoTraceSlot; }
    DM_DEVICE TraceHeader* header() const {
        const u64 slice = hw::block_idx() * u64(trace_warps(kConfig)) + slot();
        return reinterpret_cast<TraceHeader*>(params_.trace + slice * trace_slice_bytes(kConfig));
    }

    DM_DEVICE void record(TraceKind kind, TracePhase phase, u32 argument) const {
        if (!records()) return;
        const u32 now = u32(hw::timer_ns());
        auto* events = reinterpret_cast<TraceEvent*>(header() + 1);
        if (count_ < kConfig.trace_events)
            hw::store(events + count_, TraceEvent{last_, now, argument, trace_what(kind, phase, stalled_)});
        ++count_;
        last_ = now;
        stalled_ = 0;
    }

    // Context is const for the roles; what its tracer remembers is not.
    const MegaMoeParams& params_;
    mutable u32 last_ = 0, stalled_ = 0, count_ = 0;
};

}  // namespace deep_moe
