// The emulator's contract with the host code: memory of the ranks, launches, options, faults.
//
// A World is one group of ranks in one process. Every rank launches from its own OS thread (GIL released); one of the
// threads inside launch() drives all fibers of the world, the others wait. A launch returns when the grid of its own
// rank has ended, while grids of other ranks may still run: each rank has its own stream.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "deep_moe/layout/params.h"

namespace deep_moe::emu {

// What went wrong. Python sees EmulatorFault or its subclasses Deadlock, OutOfBounds, Protocol (deep_moe/errors.py).
// Race becomes Protocol, Internal a plain EmulatorFault.
enum class FaultKind { Internal, Race, Deadlock, OutOfBounds, Protocol };

class Fault : public std::runtime_error {
public:
    Fault(FaultKind kind_, const std::string& message) : std::runtime_error(message), kind(kind_) {}
    const FaultKind kind;
};

// Memory that a launch may touch. An access that is not inside exactly one region is an OutOfBounds fault, so give
// every buffer field its own region (own buffer and peers alike).
struct Region {
    std::string name;  // as errors should call it, e.g. "l1_pool"
    u8* base = nullptr;
    u64 bytes = 0;
    bool writable = false;
    i32 rank = -1;  // whose memory it is, for messages; -1: nobody's (weights, outputs)
};

struct SmemField {
    std::string name;
    u32 offset = 0, bytes = 0;
    bool racy = false;  // its words may be read and written without synchronisation (flags that only ever rise)
};

struct LaunchRequest {
    u32 rank = 0;
    std::string name;              // of the kernel, for messages
    void* entry = nullptr;         // body of one thread; called with one pointer per argument
    u32 num_sms = 0, threads = 0;  // CTAs (all resident), threads per CTA (a multiple of 32)
    u32 cluster_size = 1;          // CTAs of a cluster; divides num_sms
    u32 smem_bytes = 0;
    std::vector<std::vector<u8>> args;  // bytes of the arguments; at most 4; copied to 64-byte aligned memory
    std::vector<Region> regions;
    std::vector<SmemField> smem_fields;  // a field named "smem_barriers" gives barriers their index in reports
};

struct Options {
    u64 seed = 0;
    bool weak_memory = true;    // detect unordered accesses and missing proxy fences (they are faults)
    bool async_effects = true;  // copies and wgmma take effect at a seeded later moment; false: at once
    double host_wait_s = 600;   // how long to wait for a live rank that does not launch, before the clock jumps
};

// What one launch did.
struct Counts {
    u64 wgmma = 0;  // warpgroup instructions
    u64 tma_loads = 0, bulk_loads = 0, bulk_stores = 0;
    u64 mbarrier_arrivals = 0, mbarrier_waits = 0;
    u64 switches = 0;  // fibers resumed
    u64 macs = 0;      // multiply-adds inside wgmma
};

class WorldImpl;

class World {
public:
    explicit World(u32 num_ranks);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    u32 num_ranks() const;
    // Page-aligned memory of one rank, filled with 0x7f; lives as long as the world, or until released.
    u8* allocate(u32 rank, u64 bytes, const std::string& name);
    void release(u8* base);

    // Blocks until the grid has ended. Throws Fault; after a fault, every launch of this world throws it again.
    Counts launch(const LaunchRequest& request, const Options& options);
    // The rank's host thread has returned or raised and will not launch again; peers that wait for it may time out.
    void rank_ended(u32 rank, const std::string& why);
    // The rank lives (again): call it when a host thread starts to act for the rank.
    void rank_started(u32 rank);
    // Optional: the rank's host thread waits for other ranks (a host barrier), so do not wait for its next launch.
    void rank_blocked(u32 rank, bool blocked);

private:
    std::unique_ptr<WorldImpl> impl_;
};

// The emulator's tensor map: what tma_load_* decodes.
TensorMap encode_tensor_map(const TensorMapSpec& spec, const void* base);

}  // namespace deep_moe::emu
