// Generic-proxy memory access: weak, relaxed, acquire, release; global and shared; fences.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::hw {

// Weak accesses. T is a 1, 2, 4 or 8 byte scalar, Vec16, or a 16-byte struct.
template <typename T>
DM_DEVICE T load(const T* p) {
    return *p;
}
template <typename T>
DM_DEVICE void store(T* p, T value) {
    *p = value;
}
// Asks for the line of an address in the L2 cache.
DM_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
// For all lines of a multiple of 16 bytes, aligned to 16.
DM_DEVICE void bulk_prefetch(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
DM_DEVICE u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Of 16 bytes that nobody will use again: the first to leave the L2 cache.
DM_DEVICE Vec16 load_evict_first(const Vec16* p) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p), "l"(evict_first_policy())
                 : "memory");
    return v;
}
DM_DEVICE void store_evict_first(Vec16* p, Vec16 v) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%4], {%0, %1, %2, %3}, %5;" ::"r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3]), "l"(p), "l"(evict_first_policy())
                 : "memory");
}
template <typename T>
DM_DEVICE T load_shared(const T* p) {
    return *p;
}
template <typename T>
DM_DEVICE void store_shared(T* p, T value) {
    *p = value;
}
// Returns the old value.
DM_DEVICE u32 atomic_add_shared(u32* p, u32 value) { return atomicAdd(p, value); }

#define DM_SCOPED(op, type, reg, suffix)                                     \
    if constexpr (kScope == Scope::Gpu)                                      \
        asm volatile(op ".gpu" suffix : "=" reg(value) : "l"(p) : "memory"); \
    else                                                                     \
        asm volatile(op ".sys" suffix : "=" reg(value) : "l"(p) : "memory"); \
    return value;

template <Scope kScope>
DM_DEVICE u32 load_acquire(const u32* p) {
    u32 value;
    DM_SCOPED("ld.acquire", u32, "r", ".global.u32 %0, [%1];")
}
template <Scope kScope>
DM_DEVICE u64 load_acquire(const u64* p) {
    u64 value;
    DM_SCOPED("ld.acquire", u64, "l", ".global.u64 %0, [%1];")
}
template <Scope kScope>
DM_DEVICE u32 load_relaxed(const u32* p) {
    u32 value;
    DM_SCOPED("ld.relaxed", u32, "r", ".global.u32 %0, [%1];")
}
template <Scope kScope>
DM_DEVICE u64 load_relaxed(const u64* p) {
    u64 value;
    DM_SCOPED("ld.relaxed", u64, "l", ".global.u64 %0, [%1];")
}
#undef DM_SCOPED

DM_DEVICE void store_release_sys(u32* p, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DM_DEVICE void store_release_sys(u64* p, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DM_DEVICE void store_release_gpu(u64* p, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DM_DEVICE void store_relaxed_sys(u64* p, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Atomic read-modify-write of global memory; returns the old value.
DM_DEVICE u32 atomic_add_relaxed_gpu(u32* p, u32 value) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
    return old;
}
template <Scope kScope>
DM_DEVICE u32 atomic_add_acq_rel(u32* p, u32 value) {
    u32 old;
    if constexpr (kScope == Scope::Gpu)
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
    else
        asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
    return old;
}
DM_DEVICE u64 atomic_cas_relaxed_sys(u64* p, u64 expected, u64 desired) {
    u64 old;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(p), "l"(expected), "l"(desired)
                 : "memory");
    return old;
}
// Adds without returning; everything this thread did or observed before is visible with it.
DM_DEVICE void add_release_gpu(u32* p, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// The same for loads alone: what this thread has seen to have come (bulk copies, by their barrier) cannot be changed any
// more by whoever sees the sum, and nothing else is to be visible. NOTES: a release waits for 1000 clocks and more.
DM_DEVICE void add_after_loads_gpu(u64* p, u64 value) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
template <Scope kScope>
DM_DEVICE void add_release(u64* p, u64 value) {
    if constexpr (kScope == Scope::Gpu)
        asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
    else
        asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Orders this thread's generic accesses before its later async-proxy ones (bulk copies, TMA, wgmma), both ways.
DM_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for accesses of this CTA's shared memory alone: before a bulk_store of what threads have written there.
// NOTES: it compiles to MEMBAR.ALL.CTA, about 50 clocks on an H200; the other one to MEMBAR.ALL.GPU, about 1000
// (sm_90a, CUDA 13.0).
DM_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace deep_moe::hw
