// Meetings of lanes.
#pragma once

#include "race.h"

namespace deep_moe::emu {

// One more lane arrives at a meeting of `size` lanes; true for the last. All must bring the same operation, value and
// argument (`uniform`), or only the same operation.
bool arrive(Fiber* f, Meeting& meeting, Collective op, u64 value, u32 argument, u32 size, bool uniform);

struct WarpRange {
    Warp* first;
    u32 count;
};
WarpRange warpgroup_warps(Fiber* f);
Warpgroup& warpgroup_of(Fiber* f);
// Wakes every lane of these warps but f.
void wake_others(Fiber* f, WarpRange warps);

// cluster.cpp: sync_cluster.
void cluster_collective(Fiber* f);
// wgmma.cpp: what the last of 128 lanes to arrive does.
void complete_wgmma_collective(Fiber* f, Collective op, u32 argument);

}  // namespace deep_moe::emu
