// From a LaunchRequest to fibers that can run, and back.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "context.h"
#include "scheduler.h"

namespace deep_moe::emu {

namespace {

constexpr u32 kStacksPerBlock = 64;
constexpr u32 kRegisterFile = 65536;
constexpr u32 kMaxSharedBytes = 232448;
constexpr u32 kMaxClusterSize = 8;  // that every GPU with clusters runs

// First function on a fiber's stack.
void fiber_main() {
    Fiber* f = static_cast<Fiber*>(self());
    const Grid& grid = *f->cta->grid;
    using Entry = void (*)(void*, void*, void*, void*);
    void* a[4] = {};
    for (u32 i = 0; i < grid.arguments.size(); ++i) a[i] = grid.arguments[i];
    try {
        reinterpret_cast<Entry>(grid.request->entry)(a[0], a[1], a[2], a[3]);
    } catch (const std::exception& e) {
        fail(f, FaultKind::Internal, std::string("the kernel threw: ") + e.what());
    } catch (...) {
        fail(f, FaultKind::Internal, "the kernel threw an exception");
    }
    f->world->finish(f);
}

void check(bool ok, const LaunchRequest& r, const std::string& what) {
    if (!ok)
        throw Fault(FaultKind::Protocol, "launch of " + r.name + " on rank " + std::to_string(r.rank) + ": " + what);
}

void check_request(const LaunchRequest& r, u32 num_ranks) {
    check(r.rank < num_ranks, r, "no such rank");
    check(r.entry != nullptr, r, "no kernel");
    check(r.num_sms >= 1, r, "num_sms must be at least 1");
    check(r.cluster_size >= 1 && r.cluster_size <= kMaxClusterSize, r, "cluster_size must be in 1..8");
    check(r.num_sms % r.cluster_size == 0, r, "num_sms must be a multiple of cluster_size");
    check(r.threads >= 32 && r.threads % 32 == 0 && r.threads <= kMaxCtaThreads, r,
          "threads must be a multiple of 32 up to 1024");
    check(r.smem_bytes <= kMaxSharedBytes, r, "more than 232448 bytes of shared memory");
    check(r.args.size() <= 4, r, "more than 4 arguments");
    for (const SmemField& f : r.smem_fields)
        check(f.offset % 16 == 0 && u64(f.offset) + f.bytes <= r.smem_bytes, r, "bad shared-memory field " + f.name);
}

}  // namespace

// Takes what the ranks have launched since the last time, in rank order.
void WorldImpl::admit(std::unique_lock<std::mutex>& lock) {
    have_incoming = false;
    std::vector<Launch*> launches;
    std::swap(launches, incoming);
    std::sort(launches.begin(), launches.end(),
              [](const Launch* a, const Launch* b) { return a->request->rank < b->request->rank; });
    for (Launch* launch : launches) {
        try {
            build(*launch);
        } catch (const Fault& f) {
            raise(lock, f.kind, f.what());
            return;
        }
    }
}

void WorldImpl::build(Launch& launch) {
    const LaunchRequest& r = *launch.request;
    const Options& o = *launch.options;
    check_request(r, num_ranks());
    RankState& rank = ranks[r.rank];
    check(rank.running == nullptr, r, "the rank already runs a kernel");
    bool idle = true;
    for (RankState& other : ranks) idle = idle && other.running == nullptr;
    if (idle) {
        random = Random(o.seed);
        weak_memory = o.weak_memory;
        async_effects = o.async_effects;
        max_delay_log2 = 2 + random.below(13);
        mean_budget = 4u << (2 * random.below(4));
        woken_at_progress = 0;
        old_values.clear();
    }
    random.mix(r.rank * 1000003ull + rank.launches++);
    rank.running = &launch;

    launch.grid = std::make_unique<Grid>();
    Grid& grid = *launch.grid;
    grid.request = &r;
    grid.options = o;
    grid.launch = &launch;
    grid.rank = r.rank;
    grid.live = r.num_sms;
    for (const std::vector<u8>& bytes : r.args) {
        grid.argument_storage.push_back(std::make_unique<u8[]>(bytes.size() + 64));
        u8* aligned = reinterpret_cast<u8*>(align_up<u64>(u64(grid.argument_storage.back().get()), 64));
        std::memcpy(aligned, bytes.data(), bytes.size());
        grid.arguments.push_back(aligned);
    }
    build_areas(grid);
    grid.field_of.assign(ceil_div(r.smem_bytes, 16u) + 1, 0);
    for (u32 i = 0; i < r.smem_fields.size(); ++i) {
        const SmemField& f = r.smem_fields[i];
        for (u32 g = f.offset / 16; g < ceil_div(f.offset + f.bytes, 16u); ++g) grid.field_of[g] = u16(i + 1);
    }
    for (u32 i = 0; i < r.num_sms; ++i) {
        std::unique_ptr<Cta> cta;
        if (spare_ctas.empty()) {
            cta = std::make_unique<Cta>();
        } else {
            cta = std::move(spare_ctas.back());
            spare_ctas.pop_back();
        }
        cta->index = i;
        if (i % r.cluster_size == 0) grid.clusters.push_back(std::make_unique<Cluster>());
        cta->cluster = grid.clusters.back().get();
        cta->cluster->ctas.push_back(cta.get());
        build_cta(grid, *cta);
        grid.ctas.push_back(std::move(cta));
    }
    // Ids first: views of the fibers are made large enough for all of them.
    for (auto& cta : grid.ctas) assign_agents(grid, *cta);
    for (auto& cta : grid.ctas)
        for (Fiber* f : cta->fibers) {
            f->view = rank.view;
            make_ready(f);
        }
}

void WorldImpl::build_areas(Grid& grid) {
    for (const Region& region : grid.request->regions) {
        if (region.bytes == 0) continue;
        const Shadow* shadow = nullptr;
        for (auto& arena : arenas)
            if (arena->shadow.contains(region.base)) shadow = &arena->shadow;
        if (!shadow && region.writable && weak_memory) {
            grid.own_shadows.push_back(std::make_unique<Shadow>(region.base, region.bytes));
            shadow = grid.own_shadows.back().get();
        }
        grid.areas.push_back({&region, region.base, region.base + region.bytes, shadow});
    }
    std::sort(grid.areas.begin(), grid.areas.end(), [](const Area& a, const Area& b) { return a.begin < b.begin; });
    for (u32 i = 1; i < grid.areas.size(); ++i)
        check(grid.areas[i - 1].end <= grid.areas[i].begin, *grid.request,
              "regions " + grid.areas[i - 1].region->name + " and " + grid.areas[i].region->name + " overlap");
}

void WorldImpl::build_cta(Grid& grid, Cta& cta) {
    const LaunchRequest& r = *grid.request;
    if (cta.shared == nullptr) {
        void* memory =
            mmap(nullptr, align_up(kMaxSharedBytes, 4096u), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw Fault(FaultKind::Internal, "out of memory for shared memory");
        cta.shared = static_cast<u8*>(memory);
        cta.shadow = Shadow(cta.shared, kMaxSharedBytes);
    }
    cta.grid = &grid;
    std::memset(cta.shared, 0xff, r.smem_bytes);  // NaNs
    if (r.smem_bytes != 0) cta.shadow.clear();
    cta.tensor_reads.assign(weak_memory ? ceil_div(r.smem_bytes, 16u) : 0, TensorReads{});
    cta.barrier_of.assign(ceil_div(r.smem_bytes, 8u), 0);
    cta.barriers.clear();
    cta.fibers.clear();
    cta.warps = std::vector<Warp>(r.threads / kWarpSize);
    cta.warpgroups = std::vector<Warpgroup>(ceil_div(r.threads, kWarpgroupSize));
    cta.block_meeting = Meeting{};
    cta.live = r.threads;
    cta.in_flight = 0;
    const u32 registers = min_of(255u, kRegisterFile / r.threads) / 8 * 8;
    for (Warpgroup& wg : cta.warpgroups) wg.registers = registers;
    cta.free_registers = kRegisterFile / kWarpgroupSize - registers * u32(cta.warpgroups.size());
    for (u32 w = 0; w < cta.warps.size(); ++w) {
        cta.warps[w].cta = &cta;
        cta.warps[w].index = w;
        cta.warps[w].slow = random.one_in(6);
    }
    for (u32 t = 0; t < r.threads; ++t) cta.fibers.push_back(build_fiber(grid, cta, t));
}

Fiber* WorldImpl::build_fiber(Grid& grid, Cta& cta, u32 thread) {
    u8* stack = take_stack();
    *reinterpret_cast<u64*>(stack) = ~u64(stack);  // overwritten by an overflow
    u8* head = stack + head_offset(u64(stack));
    Fiber* f = new (head) Fiber();
    f->api = &kApi;
    f->api_version = kApiVersion;
    f->shared_memory = cta.shared;
    f->thread_idx = thread;
    f->block_idx = cta.index;
    f->grid_dim = grid.request->num_sms;
    f->cluster_rank = cta.index % grid.request->cluster_size;
    f->world = this;
    f->cta = &cta;
    f->warp = &cta.warps[thread / kWarpSize];
    f->lane = thread % kWarpSize;
    f->warp->lanes[f->lane] = f;
    f->sp = new_context(head, fiber_main);
    return f;
}

u8* WorldImpl::take_stack() {
    if (free_stacks.empty()) {
        const u64 bytes = (kStacksPerBlock + 1) * kStackBytes;  // one more for alignment
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw Fault(FaultKind::Internal, "out of memory for stacks");
        madvise(memory, bytes, MADV_NOHUGEPAGE);
        stack_blocks.push_back(static_cast<u8*>(memory));
        u8* first = reinterpret_cast<u8*>(align_up<u64>(u64(memory), kStackBytes));
        for (u32 i = kStacksPerBlock; i-- > 0;) free_stacks.push_back(first + i * kStackBytes);
    }
    u8* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}

// The n-th warp of a rank is the same agent in every launch: its time only goes on.
void WorldImpl::assign_agents(Grid& grid, Cta& cta) {
    RankState& rank = ranks[grid.rank];
    const u32 per_cta = u32(cta.warps.size());
    for (Warp& warp : cta.warps) {
        const u32 linear = cta.index * per_cta + warp.index;
        while (rank.agents.size() <= linear) {
            check(agent_rank.size() < 65535, *grid.request, "more warps than the race detector can name");
            rank.agents.push_back(u32(agent_rank.size()));
            agent_rank.push_back(grid.rank);
            agent_time.push_back(1);
            agent_names.emplace_back();
        }
        warp.agent = rank.agents[linear];
        warp.time = agent_time[warp.agent];
        agent_names[warp.agent] = "rank " + std::to_string(grid.rank) + " " + grid.request->name + " CTA " +
                                  std::to_string(cta.index) + " warp " + std::to_string(warp.index);
    }
    sizes.agents = align_up(u32(agent_rank.size()), 8u);
    sizes.barriers = align_up(max_of(u32(barrier_phase.size()), sizes.barriers), 8u);
    if (!rank.view) rank.view = sizes.create();
    if (rank.view->agents() < sizes.agents) rank.view = sizes.copy(rank.view);
}

// Stacks and shared memory of an ended grid serve the next one.
void WorldImpl::recycle(Grid& grid) {
    for (auto& cta : grid.ctas) {
        for (Fiber* f : cta->fibers) {
            f->~Fiber();
            free_stacks.push_back(reinterpret_cast<u8*>(u64(f) & ~(kStackBytes - 1)));
        }
        cta->fibers.clear();
        cta->barriers.clear();
        cta->warps.clear();
        spare_ctas.push_back(std::move(cta));
    }
    grid.ctas.clear();
    grid.clusters.clear();
}

}  // namespace deep_moe::emu
