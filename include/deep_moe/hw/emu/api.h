// How a kernel compiled for the CPU reaches the emulator: a table of functions that the emulator writes on top of every
// fiber's stack. The kernel's shared object therefore has no undefined symbol and knows nothing of who loads it.
#pragma once

#include "deep_moe/base/common.h"
#include "deep_moe/layout/params.h"

namespace deep_moe::emu {

enum class Scope : u32 { Cta, Gpu, Sys };
enum class Order : u32 { Weak, Relaxed, Acquire, Release, AcqRel };

// Collective operations; all lanes of the group must arrive at the same one.
enum class Collective : u32 {
    None,
    SyncWarp,
    Shfl,
    ShflXor,
    ShflUp,
    Ballot,
    AllLanes,     // warp
    SyncBlock,    // CTA
    SyncCluster,  // all CTAs of a cluster
    SetMaxRegisters,
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait,
    Wgmma  // warpgroup
};

struct MemoryOp {
    Order order;
    Scope scope;
    bool shared;  // must (or must not) be this CTA's shared memory
};

enum class Rmw : u32 { Add, Cas };

// Of one thread. A lies in its registers `a`, or, where these are null, in shared memory.
struct WgmmaOperands {
    float* d;  // [n / 2]
    u32 n;
    const u32* a;  // [4]
    u64 desc_a, desc_b;
    bool accumulate;
};

struct ThreadHead;

// One version number for the table and ThreadHead below; part of every message about a mismatch.
constexpr u32 kApiVersion = 5;

struct Api {
    u64 (*collective)(ThreadHead*, Collective op, u64 value, u32 argument);
    void (*load)(ThreadHead*, const void* p, void* value, u32 bytes, MemoryOp op);
    void (*store)(ThreadHead*, void* p, const void* value, u32 bytes, MemoryOp op);
    u64 (*read_modify_write)(ThreadHead*, void* p, u32 bytes, Rmw rmw, u64 expected, u64 operand, MemoryOp op);
    void (*fence_proxy_async)(ThreadHead*);
    void (*fence_proxy_async_shared)(ThreadHead*);

    u32 (*shared_address)(ThreadHead*, const void* p);
    void (*mbarrier_init)(ThreadHead*, u64* barrier, u32 arrivals);
    void (*fence_mbarrier_init)(ThreadHead*);
    void (*mbarrier_arrive)(ThreadHead*, u64* barrier, u32 expect_tx_bytes);
    // On the barrier at the same place in the CTA of this rank in the cluster.
    void (*mbarrier_arrive_cluster)(ThreadHead*, u64* barrier, u32 cta_rank);
    bool (*mbarrier_test_wait)(ThreadHead*, u64* barrier, u32 parity);
    bool (*mbarrier_try_wait)(ThreadHead*, u64* barrier, u32 parity);

    // Loads go to the same places in every CTA of the cluster whose bit is set in cta_mask.
    void (*bulk_load)(ThreadHead*, void* shared, const void* global, u32 bytes, u64* barrier, u32 cta_mask);
    void (*bulk_store)(ThreadHead*, void* global, const void* shared, u32 bytes);
    void (*prefetch)(ThreadHead*, const void* global);
    void (*bulk_commit)(ThreadHead*);
    void (*bulk_wait)(ThreadHead*, u32 pending);
    void (*tma_load)(ThreadHead*, void* shared, const TensorMap* map, u32 rank, const u32* coordinates, u64* barrier,
                     u32 cta_mask);

    void (*wgmma)(ThreadHead*, const WgmmaOperands& operands);

    u64 (*timer_ns)(ThreadHead*);
    void (*poll_pause)(ThreadHead*, u32 site, u32 index, const void* address);
    void (*exit_thread)(ThreadHead*);
};

// Stacks are aligned to their size, so that any stack pointer finds the head on top of its stack. Heads of neighbours
// differ in their low address bits, or all of them would fall into the same few cache sets.
constexpr u64 kStackBytes = 128 * 1024;  // unoptimised kernels, as mutants are, need over 64
constexpr u64 kHeadBytes = 512;
constexpr u64 kHeadColours = 32;

constexpr u64 head_offset(u64 stack) { return kStackBytes - kHeadBytes * (1 + (stack / kStackBytes) % kHeadColours); }

struct alignas(64) ThreadHead {
    const Api* api;
    u8* shared_memory;
    u32 thread_idx, block_idx, grid_dim, cluster_rank, api_version;
};
static_assert(sizeof(ThreadHead) <= kHeadBytes);

// The running thread. Not volatile: within a function the compiler may keep it, it never changes.
DM_DEVICE ThreadHead* self() {
    u64 sp;
#if defined(__x86_64__)
    asm("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(sp));
#else
#error "the emulator needs a CPU with x86-64 or AArch64 instructions"
#endif
    const u64 stack = sp & ~(kStackBytes - 1);
    return reinterpret_cast<ThreadHead*>(stack + head_offset(stack));
}

}  // namespace deep_moe::emu
