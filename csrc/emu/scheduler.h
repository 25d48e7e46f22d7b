// WorldImpl: launches of all ranks, the fibers that can run, events to come, and the end of it all.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <queue>

#include "machine.h"
#include "random.h"

namespace deep_moe::emu {

// A call of World::launch.
struct Launch {
    const LaunchRequest* request;
    const Options* options;
    std::unique_ptr<Grid> grid;  // while it runs
    bool done = false;
    Counts counts;
};

// An asynchronous copy between its issue and its completion.
struct Copy {
    enum class Kind : u8 { BulkLoad, BulkStore, Tma } kind;
    Cta* cta;     // whose shared memory it reads or writes
    Cta* issuer;  // whose thread started it
    u8* shared;
    u8* global;
    u32 bytes;
    Barrier* barrier;      // loads
    u32 phase;             // of the barrier when the copy was issued
    Fiber* fiber;          // stores: whose bulk group
    const TensorMap* map;  // tma
    u32 coordinates[3];
};

struct Event {
    u64 due;    // step
    u64 order;  // ties: first come, first served
    u32 copy;   // index in copies, or kNoCopy: `launch` is over
    Launch* launch;
    bool operator<(const Event& o) const { return due != o.due ? due > o.due : order > o.order; }
};
constexpr u32 kNoCopy = ~0u;

struct Arena {
    std::string name;
    u8* base;
    u64 bytes, mapped;
    Shadow shadow;
};

// What releases have left at a word.
struct SyncWord {
    ViewRef system;                              // by releases of sys scope
    std::vector<std::pair<u32, ViewRef>> ranks;  // by releases of threads of that rank, any scope
};

// What a word held before its last strong write: a relaxed load that nothing orders after the write may still see it.
struct OldValue {
    u64 value;
    const Cta* writer;
    bool gone;  // another CTA has seen the new value
};

struct RankState {
    bool ended = false, blocked = false;
    std::string why_ended;
    Launch* running = nullptr;
    u32 launches = 0;
    std::chrono::steady_clock::time_point assemble_until{};
    std::vector<u32> agents;                    // linear warp index -> agent id
    std::vector<std::vector<u32>> barrier_ids;  // CTA -> nth barrier -> id
    ViewRef view;                               // what the rank's stream knows
};

class WorldImpl {
public:
    explicit WorldImpl(u32 num_ranks);
    ~WorldImpl();

    u8* allocate(u32 rank, u64 bytes, const std::string& name);
    void release(u8* base);
    Counts launch(const LaunchRequest& request, const Options& options);
    void rank_ended(u32 rank, const std::string& why);
    void rank_started(u32 rank);
    void rank_blocked(u32 rank, bool blocked);
    u32 num_ranks() const { return u32(ranks.size()); }

    // ---- for fibers -------------------------------------------------------------------------------------------------
    // Every hw call starts here: time passes, and another thread may run first.
    void enter(Fiber* f) {
        ++step;
        if (--budget <= 0) preempt(f);
    }
    void preempt(Fiber* f);
    void block(Fiber* f, Wait wait);  // returns when somebody has made f ready
    void make_ready(Fiber* f);
    void finish(Fiber* f);            // the thread has ended; does not return
    void add_copy(const Copy& copy);  // takes effect later, or at once without async effects
    void fail_copy(const Cta& cta, FaultKind kind, const std::string& message);  // where no fiber is at fault
    u64 now_ns() const { return step + clock_offset; }

    // Polls: threads that sleep until a word changes.
    void park(Fiber* f, const void* address);
    void wrote(const void* p) {
        ++progress;
        if (poll_filter[filter_slot(p)] != 0) wake_pollers(p);
    }
    SyncWord* find_sync(const void* p) {
        auto it = sync_words.find(p);
        return it == sync_words.end() ? nullptr : &it->second;
    }

    // ---- state, changed only by the OS thread that drives -----------------------------------------------------------
    u64 step = 1;
    u64 progress = 1;  // changes whenever somebody waiting might want to look again
    i64 budget = 1;
    u64 clock_offset = 0;
    bool weak_memory = true, async_effects = true;
    Random random;
    Fiber* current = nullptr;
    ViewSizes sizes;
    std::vector<u32> agent_rank;  // agent id -> rank
    std::vector<std::string> agent_names;
    std::vector<u32> agent_time;     // where the next launch of the agent's warp goes on
    std::vector<u32> barrier_phase;  // barrier id -> phases completed by ended launches
    std::vector<std::string> barrier_names;
    std::unordered_map<const void*, SyncWord> sync_words;
    std::unordered_map<const void*, OldValue> old_values;
    std::vector<RankState> ranks;
    std::vector<std::unique_ptr<Arena>> arenas;

private:
    friend void fail(Fiber*, FaultKind, const std::string&);
    friend std::string stall_report(WorldImpl&);

    // scheduler.cpp
    void drive(Launch& own);
    void run_warp(u32 index);
    void resume(Fiber* f);
    u32 pick_warp();
    void run_event();
    bool wake_all_pollers();
    void wake_pollers(const void* p);
    void unpark(Fiber* f);
    void end_grid(Grid& grid);
    static u32 filter_slot(const void* p) { return u32((u64(p) >> 3) * 0x9e3779b1u >> 20) & 4095; }

    // admission.cpp
    void admit(std::unique_lock<std::mutex>& lock);
    void build(Launch& launch);
    void build_areas(Grid& grid);
    void build_cta(Grid& grid, Cta& cta);
    Fiber* build_fiber(Grid& grid, Cta& cta, u32 thread);
    void assign_agents(Grid& grid, Cta& cta);
    void recycle(Grid& grid);
    u8* take_stack();

    // stall.cpp
    bool assembling(std::unique_lock<std::mutex>& lock);
    void stalled(std::unique_lock<std::mutex>& lock);
    void raise(std::unique_lock<std::mutex>& lock, FaultKind kind, const std::string& message);

    std::mutex mutex;
    std::condition_variable changed;
    bool driving = false;
    std::vector<Launch*> incoming;
    std::atomic<bool> have_incoming = false, maybe_absent = true;
    std::optional<Fault> fault;

    void* driver_sp = nullptr;
    std::optional<Fault> fiber_fault;  // raised by a fiber, taken over by the driver
    std::vector<Warp*> ready;
    std::priority_queue<Event> events;
    u64 event_order = 0;
    std::vector<Copy> copies;
    std::vector<u32> free_copies;
    u32 max_delay_log2 = 10;
    u32 mean_budget = 64;
    u64 woken_at_progress = 0;
    u32 clock_jumps = 0, idle_looks = 0;
    u64 stalled_at = 0;       // value of progress when all ranks were there and nothing could run
    u32 fruitless_looks = 0;  // since then

    std::unordered_map<const void*, Fiber*> pollers;  // address -> chain
    u8 poll_filter[4096] = {};

    std::vector<u8*> stack_blocks, free_stacks;
    std::vector<std::unique_ptr<Cta>> spare_ctas;
};

// Completion of a copy (async.cpp).
void complete_copy(WorldImpl& world, const Copy& copy);
// The table of functions that kernels call.
extern const Api kApi;
std::string stall_report(WorldImpl& world);

// The arithmetic of one tensor-core instruction (fp8_mma.cpp): acc[64][n] (+)= a[64][32] * b[n][32]^T.
void fp8_mma(float* acc, u32 n, const u8* a, const u8* b, bool accumulate);

}  // namespace deep_moe::emu
