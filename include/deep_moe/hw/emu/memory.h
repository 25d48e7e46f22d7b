// Generic-proxy memory access and fences, for the emulator. Names and meaning: hw/cuda/memory.cuh.
#pragma once

#include "deep_moe/hw/emu/api.h"

namespace deep_moe::hw {

template <typename T>
DM_DEVICE T emu_load(const T* p, emu::MemoryOp op) {
    static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "1, 2, 4, 8 or 16 bytes");
    emu::ThreadHead* t = emu::self();
    T value;
    t->api->load(t, p, &value, sizeof(T), op);
    return value;
}
template <typename T>
DM_DEVICE void emu_store(T* p, const T& value, emu::MemoryOp op) {
    static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "1, 2, 4, 8 or 16 bytes");
    emu::ThreadHead* t = emu::self();
    t->api->store(t, p, &value, sizeof(T), op);
}
template <typename T>
DM_DEVICE T emu_rmw(T* p, emu::Rmw rmw, T expected, T operand, emu::MemoryOp op) {
    emu::ThreadHead* t = emu::self();
    return T(t->api->read_modify_write(t, p, sizeof(T), rmw, expected, operand, op));
}
constexpr emu::MemoryOp emu_global(emu::Order order, Scope scope = Scope::Cta) {
    return {order, emu::Scope(u32(scope)), false};
}
constexpr emu::MemoryOp emu_shared(emu::Order order) { return {order, emu::Scope::Cta, true}; }

// Weak accesses. T is a 1, 2, 4 or 8 byte scalar, Vec16, or a 16-byte struct.
template <typename T>
DM_DEVICE T load(const T* p) {
    return emu_load(p, emu_global(emu::Order::Weak));
}
template <typename T>
DM_DEVICE void store(T* p, T value) {
    emu_store(p, value, emu_global(emu::Order::Weak));
}
DM_DEVICE void prefetch(const void* p) {
    emu::ThreadHead* t = emu::self();
    t->api->prefetch(t, p);
}
DM_DEVICE void bulk_prefetch(const void* p, u32 bytes) {
    prefetch(p);
    prefetch(static_cast<const u8*>(p) + bytes - 1);
}
DM_DEVICE Vec16 load_evict_first(const Vec16* p) { return load(p); }
DM_DEVICE void store_evict_first(Vec16* p, Vec16 v) { store(p, v); }
template <typename T>
DM_DEVICE T load_shared(const T* p) {
    return emu_load(p, emu_shared(emu::Order::Weak));
}
template <typename T>
DM_DEVICE void store_shared(T* p, T value) {
    emu_store(p, value, emu_shared(emu::Order::Weak));
}
// Returns the old value.
DM_DEVICE u32 atomic_add_shared(u32* p, u32 value) {
    return emu_rmw<u32>(p, emu::Rmw::Add, 0, value, emu_shared(emu::Order::Relaxed));
}

template <Scope kScope>
DM_DEVICE u32 load_acquire(const u32* p) {
    return emu_load(p, emu_global(emu::Order::Acquire, kScope));
}
template <Scope kScope>
DM_DEVICE u64 load_acquire(const u64* p) {
    return emu_load(p, emu_global(emu::Order::Acquire, kScope));
}
template <Scope kScope>
DM_DEVICE u32 load_relaxed(const u32* p) {
    return emu_load(p, emu_global(emu::Order::Relaxed, kScope));
}
template <Scope kScope>
DM_DEVICE u64 load_relaxed(const u64* p) {
    return emu_load(p, emu_global(emu::Order::Relaxed, kScope));
}

DM_DEVICE void store_release_sys(u32* p, u32 value) {
    emu_store(p, value, emu_global(emu::Order::Release, Scope::Sys));
}
DM_DEVICE void store_release_sys(u64* p, u64 value) {
    emu_store(p, value, emu_global(emu::Order::Release, Scope::Sys));
}
DM_DEVICE void store_release_gpu(u64* p, u64 value) {
    emu_store(p, value, emu_global(emu::Order::Release, Scope::Gpu));
}
DM_DEVICE void store_relaxed_sys(u64* p, u64 value) {
    emu_store(p, value, emu_global(emu::Order::Relaxed, Scope::Sys));
}

// Atomic read-modify-write of global memory; returns the old value.
DM_DEVICE u32 atomic_add_relaxed_gpu(u32* p, u32 value) {
    return emu_rmw<u32>(p, emu::Rmw::Add, 0, value, emu_global(emu::Order::Relaxed, Scope::Gpu));
}
template <Scope kScope>
DM_DEVICE u32 atomic_add_acq_rel(u32* p, u32 value) {
    return emu_rmw<u32>(p, emu::Rmw::Add, 0, value, emu_global(emu::Order::AcqRel, kScope));
}
DM_DEVICE u64 atomic_cas_relaxed_sys(u64* p, u64 expected, u64 desired) {
    return emu_rmw<u64>(p, emu::Rmw::Cas, expected, desired, emu_global(emu::Order::Relaxed, Scope::Sys));
}
// Adds without returning; everything this thread did or observed before is visible with it.
DM_DEVICE void add_release_gpu(u32* p, u32 value) {
    emu_rmw<u32>(p, emu::Rmw::Add, 0, value, emu_global(emu::Order::Release, Scope::Gpu));
}
// The same for loads alone. Here it is a release: the emulator does not tell reads that are over from others.
DM_DEVICE void add_after_loads_gpu(u64* p, u64 value) {
    emu_rmw<u64>(p, emu::Rmw::Add, 0, value, emu_global(emu::Order::Release, Scope::Gpu));
}
template <Scope kScope>
DM_DEVICE void add_release(u64* p, u64 value) {
    emu_rmw<u64>(p, emu::Rmw::Add, 0, value, emu_global(emu::Order::Release, kScope));
}

// Orders this thread's generic accesses before its later async-proxy ones (bulk copies, TMA, wgmma), both ways.
DM_DEVICE void fence_proxy_async() {
    emu::ThreadHead* t = emu::self();
    t->api->fence_proxy_async(t);
}
// The same for accesses of this CTA's shared memory alone.
DM_DEVICE void fence_proxy_async_shared() {
    emu::ThreadHead* t = emu::self();
    t->api->fence_proxy_async_shared(t);
}

}  // namespace deep_moe::hw
