// Memory of the ranks, and the meeting of their host threads: one drives, the others wait.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "scheduler.h"

namespace deep_moe::emu {

WorldImpl::WorldImpl(u32 num_ranks) : ranks(num_ranks) {
    if (num_ranks < 1 || num_ranks > kMaxRanks) throw Fault(FaultKind::Protocol, "num_ranks must be in 1..72");
}

WorldImpl::~WorldImpl() {
    for (auto& cta : spare_ctas) munmap(cta->shared, align_up(232448u, 4096u));
    for (u8* block : stack_blocks) munmap(block, 65 * kStackBytes);
    for (auto& arena : arenas) munmap(arena->base, arena->mapped);
}

u8* WorldImpl::allocate(u32 rank, u64 bytes, const std::string& name) {
    std::unique_lock lock(mutex);
    if (rank >= ranks.size()) throw Fault(FaultKind::Protocol, "allocate: no such rank");
    const u64 mapped = align_up<u64>(max_of<u64>(bytes, 1), 4096);
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    std::memset(memory, 0x7f, bytes);
    u8* base = static_cast<u8*>(memory);
    arenas.push_back(std::make_unique<Arena>(Arena{name, base, bytes, mapped, Shadow(base, mapped)}));
    return base;
}

void WorldImpl::release(u8* base) {
    std::unique_lock lock(mutex);
    for (auto it = arenas.begin(); it != arenas.end(); ++it) {
        if ((*it)->base != base) continue;
        for (auto word = sync_words.begin(); word != sync_words.end();)
            word = word->first >= base && word->first < base + (*it)->mapped ? sync_words.erase(word) : std::next(word);
        munmap(base, (*it)->mapped);
        arenas.erase(it);
        return;
    }
    throw Fault(FaultKind::Protocol, "release: not memory of this world");
}

Counts WorldImpl::launch(const LaunchRequest& request, const Options& options) {
    Launch launch{&request, &options, nullptr, false, {}};
    std::unique_lock lock(mutex);
    if (fault) throw *fault;
    incoming.push_back(&launch);
    have_incoming = true;
    changed.notify_all();
    while (!launch.done && !fault) {
        if (driving) {
            changed.wait(lock);
            continue;
        }
        driving = true;
        lock.unlock();
        drive(launch);
        lock.lock();
        driving = false;
        changed.notify_all();
    }
    if (launch.done) return launch.counts;
    // After a fault no fiber runs again. The request of this launch is about to die: forget what refers to it.
    while (driving) changed.wait(lock);
    if (launch.grid) recycle(*launch.grid);
    if (request.rank < ranks.size() && ranks[request.rank].running == &launch) ranks[request.rank].running = nullptr;
    incoming.erase(std::remove(incoming.begin(), incoming.end(), &launch), incoming.end());
    throw *fault;
}

void WorldImpl::rank_ended(u32 rank, const std::string& why) {
    std::unique_lock lock(mutex);
    if (rank >= ranks.size()) return;
    ranks[rank].ended = true;
    ranks[rank].why_ended = why;
    maybe_absent = true;
    changed.notify_all();
}

void WorldImpl::rank_started(u32 rank) {
    std::unique_lock lock(mutex);
    if (rank >= ranks.size()) return;
    ranks[rank].ended = false;
    ranks[rank].assemble_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    maybe_absent = true;
    changed.notify_all();
}

void WorldImpl::rank_blocked(u32 rank, bool blocked) {
    std::unique_lock lock(mutex);
    if (rank >= ranks.size()) return;
    ranks[rank].blocked = blocked;
    maybe_absent = true;
    changed.notify_all();
}

// ---- waiting for ranks (called by the driver, with the lock) ---------------------------------------------------------

// So that a seed means the same run every time, the world moves only while every rank is inside a launch, for as long as
// the others can be expected to come soon. True: look again.
bool WorldImpl::assembling(std::unique_lock<std::mutex>& lock) {
    if (have_incoming) return true;
    const auto now = std::chrono::steady_clock::now();
    auto until = now;
    for (const RankState& r : ranks)
        if (!r.running && !r.ended && !r.blocked) until = std::max(until, r.assemble_until);
    if (until == now) {
        maybe_absent = false;
        return false;
    }
    changed.wait_until(lock, until);
    return true;
}

constexpr u32 kLooksPerJump = 32;

// Nothing can run, nothing is in flight, and everybody has looked around.
void WorldImpl::stalled(std::unique_lock<std::mutex>& lock) {
    bool somebody_ended = false, somebody_absent = false;
    double patience = 600;
    for (const RankState& r : ranks) {
        if (r.running) patience = r.running->options->host_wait_s;
        const bool gone = r.ended || r.blocked;  // a host barrier does not end before the kernels do
        somebody_ended = somebody_ended || (gone && !r.running);
        somebody_absent = somebody_absent || (!gone && !r.running);
    }
    if (somebody_absent && idle_looks % kLooksPerJump == 0) {
        const auto status = changed.wait_for(lock, std::chrono::duration<double>(patience));
        if (status == std::cv_status::no_timeout) return;
    } else if (!somebody_absent && !somebody_ended) {
        // A loop looks at the abort word every few polls only: before this is a deadlock, let all of them do so.
        if (progress != stalled_at) fruitless_looks = 0;
        if (++fruitless_looks > kLooksPerJump) raise(lock, FaultKind::Deadlock, stall_report(*this));
        stalled_at = ++progress;
        return;
    }
    // A rank will not come: time passes, until the kernel's own time-outs end it.
    if (clock_jumps >= 64) {
        raise(lock, FaultKind::Deadlock, "waits have no time-out although a rank has ended\n" + stall_report(*this));
        return;
    }
    ++progress;
    // A loop looks at the clock and at the abort word every few polls only (comm/wait.h): let all of them do so before
    // the clock moves on, or the barriers inside a block, which look every time, would run into their time-out first.
    if (++idle_looks % kLooksPerJump != 0) return;
    ++clock_jumps;
    clock_offset += 1000ull * 1000 * 1000 * 1000;  // 1000 s
}

void WorldImpl::raise(std::unique_lock<std::mutex>&, FaultKind kind, const std::string& message) {
    if (!fault) fault.emplace(kind, message);
    changed.notify_all();
}

// ---- the public face ------------------------------------------------------------------------------------------------

World::World(u32 num_ranks) : impl_(std::make_unique<WorldImpl>(num_ranks)) {}
World::~World() = default;
u32 World::num_ranks() const { return impl_->num_ranks(); }
u8* World::allocate(u32 rank, u64 bytes, const std::string& name) { return impl_->allocate(rank, bytes, name); }
void World::release(u8* base) { impl_->release(base); }
Counts World::launch(const LaunchRequest& request, const Options& options) { return impl_->launch(request, options); }
void World::rank_ended(u32 rank, const std::string& why) { impl_->rank_ended(rank, why); }
void World::rank_started(u32 rank) { impl_->rank_started(rank); }
void World::rank_blocked(u32 rank, bool blocked) { impl_->rank_blocked(rank, blocked); }

}  // namespace deep_moe::emu
