// Running fibers: who is next, for how long, and what happens in between.
#include "scheduler.h"

#include <algorithm>

#include "cluster.h"
#include "context.h"

namespace deep_moe::emu {

// ---- called by fibers -----------------------------------------------------------------------------------------------

void WorldImpl::preempt(Fiber* f) {
    make_ready(f);
    deep_moe_emu_switch(&f->sp, driver_sp);
}

void WorldImpl::block(Fiber* f, Wait wait) {
    f->wait = wait;
    deep_moe_emu_switch(&f->sp, driver_sp);
}

void WorldImpl::make_ready(Fiber* f) {
    f->wait = Wait::None;
    Warp* w = f->warp;
    w->ready |= 1u << f->lane;
    if (!w->listed) {
        w->listed = true;
        ready.push_back(w);
    }
}

void WorldImpl::finish(Fiber* f) {
    Warp& warp = *f->warp;
    Cta& cta = *f->cta;
    if (warp.arrived != 0) fail(f, FaultKind::Protocol, "the thread ended while other lanes of its warp wait for it");
    if (f->bulk && !f->bulk->stores.empty())
        fail(f, FaultKind::Protocol, "the thread ended with bulk stores that it has not waited for");
    f->wait = Wait::Done;
    warp.exited |= 1u << f->lane;
    ++progress;
    --cta.live;
    leave_cluster(f);
    if (cta.live == 0) {
        if (cta.in_flight != 0) fail(f, FaultKind::Protocol, "the CTA ended with asynchronous copies in flight");
        for (const Warpgroup& wg : cta.warpgroups)
            if (!wg.instructions.empty())
                fail(f, FaultKind::Protocol, "the CTA ended with wgmmas that nobody has waited for");
        if (--cta.grid->live == 0) {
            // The host learns of the end a little later: ranks need not go on in the order in which they ended.
            const u64 delay = random.one_in(2) ? 0 : random.log_uniform(16);
            events.push({step + delay, event_order++, kNoCopy, cta.grid->launch});
        }
    }
    deep_moe_emu_switch(&f->sp, driver_sp);
    __builtin_unreachable();
}

void WorldImpl::add_copy(const Copy& copy) {
    if (!async_effects) {
        complete_copy(*this, copy);
        if (fiber_fault) deep_moe_emu_switch(&current->sp, driver_sp);  // for good
        return;
    }
    u32 index;
    if (free_copies.empty()) {
        index = u32(copies.size());
        copies.push_back(copy);
    } else {
        index = free_copies.back();
        free_copies.pop_back();
        copies[index] = copy;
    }
    ++copy.cta->in_flight;
    if (copy.issuer != copy.cta) ++copy.issuer->in_flight;
    events.push({step + random.log_uniform(max_delay_log2), event_order++, index, nullptr});
}

void WorldImpl::fail_copy(const Cta& cta, FaultKind kind, const std::string& message) {
    if (fiber_fault) return;
    fiber_fault.emplace(kind, "rank " + std::to_string(cta.grid->rank) + " " + cta.grid->request->name + " CTA " +
                                  std::to_string(cta.index) + ": " + message);
}

void fail(Fiber* f, FaultKind kind, const std::string& message) {
    WorldImpl& world = *f->world;
    world.fiber_fault.emplace(kind, thread_name(*f) + ": " + message);
    deep_moe_emu_switch(&f->sp, world.driver_sp);
    __builtin_unreachable();  // the driver never resumes a world with a fault
}

std::string thread_name(const Fiber& f) {
    return "rank " + std::to_string(f.cta->grid->rank) + " " + f.cta->grid->request->name + " CTA " +
           std::to_string(f.cta->index) + " warp " + std::to_string(f.warp->index) + " lane " + std::to_string(f.lane);
}

// ---- polls ----------------------------------------------------------------------------------------------------------

void WorldImpl::park(Fiber* f, const void* address) {
    const void* key = reinterpret_cast<const void*>(u64(address) & ~7ull);
    f->address = address;
    Fiber*& head = pollers[key];
    f->next_waiter = head;
    head = f;
    u8& filter = poll_filter[filter_slot(key)];
    if (filter != 255) ++filter;
    block(f, Wait::Poll);
}

void WorldImpl::wake_pollers(const void* p) {
    const void* key = reinterpret_cast<const void*>(u64(p) & ~7ull);
    auto it = pollers.find(key);
    if (it == pollers.end()) return;
    Fiber* f = it->second;
    pollers.erase(it);
    while (f) {
        Fiber* next = f->next_waiter;
        u8& filter = poll_filter[filter_slot(key)];
        if (filter != 255) --filter;
        make_ready(f);
        f = next;
    }
}

// Lets everybody who sleeps in a loop look around once: the abort word or the clock may have moved. False when nothing
// has happened since the last time.
bool WorldImpl::wake_all_pollers() {
    if (woken_at_progress == progress) return false;
    woken_at_progress = progress;
    std::vector<Fiber*> sleepers;
    for (RankState& rank : ranks) {
        if (!rank.running || !rank.running->grid) continue;
        for (auto& cta : rank.running->grid->ctas) {
            for (Fiber* f : cta->fibers)
                if (f->wait == Wait::Poll || f->wait == Wait::MBarrier) sleepers.push_back(f);
            for (auto& barrier : cta->barriers) barrier->waiters.clear();
        }
    }
    pollers.clear();
    std::fill(std::begin(poll_filter), std::end(poll_filter), u8(0));
    for (Fiber* f : sleepers) {
        f->result = 0;  // of try_wait: not yet
        make_ready(f);
    }
    return !sleepers.empty();
}

// ---- the driver -----------------------------------------------------------------------------------------------------

void WorldImpl::drive(Launch& own) {
    while (!own.done) {
        if (have_incoming || maybe_absent) {
            std::unique_lock lock(mutex);
            admit(lock);
            if (fault) return;
            if (assembling(lock)) continue;
        }
        while (!events.empty() && events.top().due <= step) run_event();
        if (fiber_fault) break;
        if (own.done) return;
        if (!ready.empty()) {
            run_warp(pick_warp());
        } else if (!events.empty()) {
            step = max_of(step, events.top().due);
        } else if (!wake_all_pollers()) {
            std::unique_lock lock(mutex);
            if (!have_incoming) stalled(lock);
            if (fault) return;
        }
        if (fiber_fault) break;
    }
    if (fiber_fault) {
        std::unique_lock lock(mutex);
        raise(lock, fiber_fault->kind, fiber_fault->what());
    }
}

u32 WorldImpl::pick_warp() {
    u32 index = random.below(u32(ready.size()));
    if (ready[index]->slow && !random.one_in(8)) index = random.below(u32(ready.size()));
    return index;
}

void WorldImpl::run_warp(u32 index) {
    Warp* warp = ready[index];
    u32 lanes = warp->ready;
    while (lanes != 0 && !fiber_fault) {
        const u32 lane = u32(__builtin_ctz(lanes));
        lanes &= lanes - 1;
        resume(warp->lanes[lane]);
    }
    if (warp->ready == 0) {  // `ready` may have grown, but warps keep their places until here
        warp->listed = false;
        ready[index] = ready.back();
        ready.pop_back();
    }
}

void WorldImpl::resume(Fiber* f) {
    f->warp->ready &= ~(1u << f->lane);
    budget = 1 + random.below(2 * mean_budget);
    current = f;
    ++f->cta->grid->counts.switches;
    deep_moe_emu_switch(&driver_sp, f->sp);
    const u64 stack = u64(f) & ~(kStackBytes - 1);
    if (*reinterpret_cast<const u64*>(stack) != ~stack && !fiber_fault)
        fiber_fault.emplace(FaultKind::Internal, thread_name(*f) + ": stack overflow");
}

void WorldImpl::run_event() {
    const Event event = events.top();
    events.pop();
    ++progress;
    if (event.copy == kNoCopy) {
        std::unique_lock lock(mutex);
        end_grid(*event.launch->grid);
        changed.notify_all();
        return;
    }
    const Copy copy = copies[event.copy];
    free_copies.push_back(event.copy);
    --copy.cta->in_flight;
    if (copy.issuer != copy.cta) --copy.issuer->in_flight;
    complete_copy(*this, copy);
}

void WorldImpl::end_grid(Grid& grid) {
    Launch& launch = *grid.launch;
    RankState& rank = ranks[grid.rank];
    if (weak_memory) {
        ViewRef all = sizes.copy(rank.view);
        for (auto& cta : grid.ctas) {
            for (Warp& warp : cta->warps) {
                for (Fiber* f : warp.lanes) sizes.join_into(all, f->view);
                sizes.writable(all).learn_all(Proxy::Generic, warp.agent, warp.time);
                agent_time[warp.agent] = warp.time + 1;
            }
            for (auto& b : cta->barriers) {
                barrier_phase[b->id] = b->view_phase() + 1;
                sizes.writable(all).learn_phase(b->id, b->view_phase());
            }
        }
        // The end of a kernel orders everything.
        for (Proxy proxy : kAsyncProxies) sizes.writable(all).fence_async(proxy);
        rank.view = all;
    }
    launch.counts = grid.counts;
    recycle(grid);
    launch.grid.reset();
    launch.done = true;
    rank.running = nullptr;
    maybe_absent = true;
    rank.assemble_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
}

}  // namespace deep_moe::emu
