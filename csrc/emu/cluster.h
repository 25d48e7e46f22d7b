// CTAs that load into and arrive in each other's shared memory.
#pragma once

#include "race.h"

namespace deep_moe::emu {

// The CTA of this rank in the cluster of f, whose shared memory f is about to touch; a fault when there is none, or
// when it has ended and its shared memory is gone.
Cta& cluster_cta(Fiber* f, u32 rank, const char* what);
// The address in the shared memory of `cta` that p is in that of f.
template <typename T>
T* same_place(const Fiber& f, const Cta& cta, T* p) {
    return reinterpret_cast<T*>(u64(cta.shared) + (u64(p) - u64(f.cta->shared)));
}
// "smem_barriers[3]", "smem_barriers[3] of CTA 1" when that is not the CTA of f.
std::string barrier_name(const Fiber& f, const Cta& cta, const Barrier& b);

// f has just arrived on the barrier of another CTA, or loads onto it: the CTA may not end before it knows of that.
void remember_visit(Fiber* f, Barrier& b, bool load);
// A thread has ended: the others may have waited only for it, and it may have been the last of its CTA.
void leave_cluster(Fiber* f);

}  // namespace deep_moe::emu
