// What a traced kernel (trace_events > 0) leaves in global memory: what the warps did, and when.
//
// The array is not part of the symmetric buffer: [CTA][traced warp] slices, each a TraceHeader and trace_events events.
// A warp's spans follow each other without gaps: each begins where the one before it ended.
//
// Spans carry the GPU's timer, which all SMs share, and not the SM's clock, whose rate changes while a launch runs: an
// H200 at its power limit falls from 1.98 to 1.5 GHz, and clocks turned into time by one rate were wrong by tens of
// microseconds in long launches. The timer moves in steps of 32 ns there. Stalls add up waits shorter than a step, so
// they are counted in clocks, and become time by the mean rate of the launch.
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

// What a warp spent a span on. With a tile: the argument is its row block and N tile, in the phase of the event.
enum class TraceKind : u32 {
    // dispatch
    Route,            // counting, listing and announcing this rank's rows
    WaitRouteCounts,  // for the other CTAs of this rank
    WaitCountFlags,   // for all ranks' counts
    Receive,          // counts into shared memory
    WaitCounts,       // for the CTA's first dispatch warp (loaders and the second dispatch warp)
    Pull,             // one row into row block `argument`; stalled: the row under way
    WaitRingSlot,     // argument: the row block that must be read for the last time first
    // loaders
    WaitRows,     // tile: its rows have been pulled (L1) or activated (L2)
    WaitWeights,  // tile: its weights have been decoded
    Load,         // tile, and the next one's entry; stalled: for free stages (LoadA: and for that entry)
    // loaders and math
    WaitTask,  // tile: for its entry; the last one has no tile
    // math
    WaitFirstStage,  // tile
    Multiply,        // tile, from its first stage on; stalled: for the others
    Epilogue,        // tile; stalled: for the other warpgroups
    Decode,          // weight tile `argument`; stalled: for free slots. Of decode warps: all their work
    WaitDone,        // for all ranks' last tiles
    Combine,
    kCount
};

enum class TracePhase : u32 { L1, L2, None };  // the first two as TaskKind

constexpr u32 kStallUnit = 16;       // clocks
constexpr u32 kMaxStall = 0xffffff;  // units

struct alignas(16) TraceEvent {
    u32 begin, end;  // low halves of the GPU's timer, in ns
    u32 argument;    // phase None: a number or kNoArgument; L1 and L2: trace_tile()
    u32 what;        // TraceKind in bits 0-5, TracePhase in bits 6-7, the stalled part of the span in units above them
};

constexpr u32 kNoArgument = ~0u;

constexpr u32 trace_tile(u32 block, u32 n_tile) { return block << 12 | (n_tile & 0xfff); }
constexpr u32 trace_what(TraceKind kind, TracePhase phase, u32 stalled_clocks) {
    return u32(kind) | u32(phase) << 6 | min_of(stalled_clocks / kStallUnit, kMaxStall) << 8;
}

// Clocks are 32 bits wide: a launch of more than two seconds cannot be read.
struct alignas(16) TraceHeader {
    u64 begin_ns, end_ns;        // of this warp, on the GPU's timer; the first span begins at begin_ns ...
    u32 begin_clock, end_clock;  // ... and the same moments on the SM's clock, for its mean rate
    u32 recorded;                // events so far; those beyond trace_events were dropped
    u32 bound_class;             // the variant
};

// Both loaders, the dispatch warps, and the first warp of each math (or decode) warpgroup that some variant has.
constexpr u32 trace_warps(const MegaMoeConfig& c) {
    return 2 + kNumDispatchWarps + (c.has_mxfp4_weights() ? kMxfp4MathWarpgroups : kFp8MathWarpgroups);
}
constexpr u32 kNoTraceSlot = ~0u;

constexpr u32 trace_slot(u32 warp) {
    if (warp < 4) return warp;
    return warp % 4 == 0 ? 3 + warp / 4 : kNoTraceSlot;
}
static_assert(trace_slot(4 * kFp8MathWarpgroups) == trace_warps(MegaMoeConfig{}) - 1);

constexpr u64 trace_slice_bytes(const MegaMoeConfig& c) {
    return sizeof(TraceHeader) + c.trace_events * u64(sizeof(TraceEvent));
}
constexpr u64 trace_bytes(const MegaMoeConfig& c, u32 num_sms) {
    return c.trace_events == 0 ? 0 : num_sms * u64(trace_warps(c)) * trace_slice_bytes(c);
}

}  // namespace deep_moe
