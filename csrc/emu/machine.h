// The emulated machine: threads (fibers), warps, warpgroups, CTAs, grids, barriers. Plain state; who changes it:
//   scheduler.cpp  runs fibers            collectives.cpp  warp, warpgroup and CTA meetings
//   memory.cpp     generic accesses       race.cpp         happens-before checks
//   barriers.cpp   mbarriers              copies.cpp       bulk and TMA copies
//   cluster.cpp    CTAs that share        wgmma.cpp        tensor-core instructions (operands.cpp: what they read)
// One OS thread at a time works on a world, so nothing here is locked.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "deep_moe/hw/emu/api.h"
#include "shadow.h"
#include "world.h"

namespace deep_moe::emu {

class WorldImpl;
struct Cluster;
struct Cta;
struct Grid;
struct Meeting;
struct Warp;
struct Fiber;

// A region of a launch, with the shadow of its memory (null: never written, nothing to check).
struct Area {
    const Region* region;
    u8* begin;
    u8* end;
    const Shadow* shadow;
};

enum class Wait : u8 { None, Collective, MBarrier, Poll, BulkGroup, Done };

struct BulkStore {
    u8* global;
    u8* shared;
    u32 bytes;
    u32 group;
    u32 serial;
    bool completed;
    const Shadow* shadow;  // of the global memory, or null
};

// Bulk groups of one thread.
struct BulkGroups {
    std::vector<BulkStore> stores;  // not yet waited for
    u32 open = 0;                   // number of the group that the next commit closes
    u32 next_serial = 0;
};

// Which of a thread's own writes to a memory the async proxy sees: those up to `fenced`, and all while it is not dirty.
struct OwnWrites {
    u32 fenced = 0;
    bool dirty = false;

    bool visible(u32 time) const { return !dirty || time <= fenced; }
    u32 visible_until(u32 now) const { return dirty ? fenced : now; }
};

struct Fiber : ThreadHead {
    WorldImpl* world = nullptr;
    Cta* cta = nullptr;
    Warp* warp = nullptr;
    void* sp = nullptr;
    u32 lane = 0;

    // What it waits for.
    Wait wait = Wait::None;
    bool named_site = false;  // poll_pause has told where the thread is
    u32 site = 0, index = 0;
    const void* address = nullptr;  // of the polled word or the barrier
    const Meeting* meeting = nullptr;
    u64 parity = 0;  // of the mbarrier phase; for bulk groups: how many may stay pending
    Fiber* next_waiter = nullptr;
    u64 result = 0;  // of a collective

    // The last words it looked at, so that poll_pause knows whether one has changed since.
    struct Look {
        const void* address;
        u64 value;
        u32 bytes;
    };
    Look looks[4] = {};
    u32 next_look = 0;
    const Area* recent_area = nullptr;

    // Happens-before (view.h).
    ViewRef view;
    ViewRef reads;  // what other CTAs' arrivals have ordered: only reads, of what it may now overwrite
    OwnWrites global_writes, shared_writes;

    OwnWrites& writes(Proxy proxy) { return proxy == Proxy::AsyncShared ? shared_writes : global_writes; }
    const OwnWrites& writes(Proxy proxy) const { return proxy == Proxy::AsyncShared ? shared_writes : global_writes; }

    std::unique_ptr<BulkGroups> bulk;
};
static_assert(sizeof(Fiber) <= kHeadBytes);

// Lanes that meet at a collective.
struct Meeting {
    Collective op = Collective::None;
    u32 count = 0;  // arrived
    u32 size = 0;   // of so many
    u64 value = 0;
    u32 argument = 0;
};

struct Warp {
    Cta* cta = nullptr;
    u32 index = 0;  // in its CTA
    Fiber* lanes[kWarpSize] = {};
    u32 ready = 0;  // lanes that can run
    u32 exited = 0;
    bool listed = false, slow = false;

    Meeting meeting;
    u32 arrived = 0;
    u64 values[kWarpSize] = {};
    u32 arguments[kWarpSize] = {};

    u32 agent = 0;  // id in views
    u32 time = 1;
    // The last join and fences, which the other lanes of the warp usually want too.
    ViewRef memo_a, memo_b, memo_result, fence_memo_in[kProxies], fence_memo_out[kProxies];
};

struct WgmmaInstruction {
    u32 accumulator;
    u32 fragment;  // of A in registers, or kNoFragment
    u32 group;
    u64 desc_a, desc_b;
    bool accumulate;
};
constexpr u32 kNoFragment = ~0u;

// Registers that wgmmas have read as A. What they hold may change between a wait and the next fence only.
struct Fragment {
    const u32* a[kWarpgroupSize];   // each thread's
    u32 values[kWarpgroupSize][4];  // when the last wgmma_fence completed, or at the first wgmma
    u32 in_flight = 0;              // instructions that may still read them
};

struct Accumulator {
    float* d[kWarpgroupSize];  // each thread's registers
    u32 n = 0;
    u32 pending = 0;  // instructions not yet executed; 0 and !live: slot is free
    bool live = false;
    std::vector<float> values;  // [64][n]
};

struct Warpgroup {
    Meeting meeting;
    u32 registers = 0;           // per thread
    u32 wants = 0;               // registers that it waits for; 0: does not wait
    u64 desc_a = 0, desc_b = 0;  // of the wgmma that its threads are arriving at
    float* d[kWarpgroupSize] = {};
    const u32* a[kWarpgroupSize] = {};  // null: A is in shared memory
    std::vector<Accumulator> accumulators;
    std::vector<Fragment> fragments;
    std::vector<WgmmaInstruction> instructions;
    u32 open_group = 0;   // number of the group that the next commit closes
    u64 fence_step = 0;   // when the last wgmma_fence completed; 0: never
    u64 retire_step = 0;  // when registers were last handed back
};

// The last time that a thread of another CTA arrived on a barrier or loaded onto it.
struct Visit {
    u16 agent;
    u8 lane;
    bool load;
    u32 time;   // of the agent
    u32 phase;  // of the barrier, view_phase()
};

struct Barrier {
    u32 id = 0;        // in views
    u32 offset = 0;    // in shared memory
    u32 expected = 0;  // arrivals of a phase
    u32 pending = 0;
    i64 tx = 0;                  // bytes expected and not yet arrived
    u32 phase = 0;               // completed phases of this launch
    u32 base_phase = 0;          // completed phases of earlier launches: ids are reused, time goes on
    bool async_visible = false;  // fence_mbarrier_init came after the initialisation
    u16 init_agent = 0;
    u8 init_lane = 0;
    u32 init_time = 0;
    ViewRef gathering, completed;              // what the arrivals of this phase know; of the last phase
    ViewRef gathering_reads, completed_reads;  // of arrivals from other CTAs, which order only what they have read
    std::vector<Visit> visits;
    std::vector<Fiber*> waiters;

    u32 view_phase() const { return base_phase + phase; }
};

constexpr u32 kMaxCtaThreads = 1024;

// Tensor-core reads of shared memory, by 16-byte granules.
struct TensorReads {
    u32 in_flight;
    u32 last[kMaxCtaThreads / kWarpSize];  // per warp of the CTA: its time when the read was waited for
};

struct Cta {
    Grid* grid = nullptr;
    Cluster* cluster = nullptr;
    u32 index = 0;
    u8* shared = nullptr;  // [smem_bytes]
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Meeting block_meeting;
    u32 live = 0;                 // threads that have not ended
    u32 free_registers = 0;       // of the register file, in registers per thread of a warpgroup
    u32 in_flight = 0;            // asynchronous operations
    std::vector<u16> barrier_of;  // shared word / 8 -> index in `barriers` + 1; 0: none
    std::vector<std::unique_ptr<Barrier>> barriers;
    Shadow shadow;
    std::vector<TensorReads> tensor_reads;
};

// Neighbouring CTAs, by rank. A CTA alone is a cluster of one.
struct Cluster {
    std::vector<Cta*> ctas;
    Meeting meeting;

    u32 live() const {
        u32 threads = 0;
        for (const Cta* cta : ctas) threads += cta->live;
        return threads;
    }
};

struct Launch;

struct Grid {
    const LaunchRequest* request = nullptr;
    Options options;
    Launch* launch = nullptr;
    u32 rank = 0;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<u8*> arguments;
    std::vector<std::unique_ptr<u8[]>> argument_storage;
    std::vector<Area> areas;  // sorted by address
    std::vector<std::unique_ptr<Shadow>> own_shadows;
    std::vector<u16> field_of;  // shared offset / 16 -> index in smem_fields + 1
    u32 live = 0;               // CTAs that have not ended
    Counts counts;
};

std::string thread_name(const Fiber& f);                     // "rank 0 stage CTA 1 warp 2 lane 3"
std::string barrier_name(const Cta& cta, const Barrier& b);  // "smem_barriers[3]"
std::string cta_name(const Cta& cta);                        // "CTA 1", "CTA 1 (cluster of CTAs 0-1)"
std::string collective_text(Collective op);
[[noreturn]] void fail(Fiber* f, FaultKind kind, const std::string& message);

}  // namespace deep_moe::emu
