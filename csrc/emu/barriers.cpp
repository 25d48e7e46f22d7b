// mbarriers: arrivals, transaction bytes, phases.
#include "api_functions.h"
#include "async.h"

namespace deep_moe::emu {

namespace {

constexpr u32 kSharedWindow = 1024;  // shared addresses do not start at 0, so that nobody takes them for offsets

u32 barrier_id(Fiber* f) {
    WorldImpl& w = *f->world;
    Cta& cta = *f->cta;
    RankState& rank = w.ranks[cta.grid->rank];
    if (rank.barrier_ids.size() <= cta.index) rank.barrier_ids.resize(cta.index + 1);
    std::vector<u32>& ids = rank.barrier_ids[cta.index];
    const u32 nth = u32(cta.barriers.size());
    if (ids.size() <= nth) {
        if (w.barrier_phase.size() >= 65535)
            fail(f, FaultKind::Internal, "more barriers than the race detector can name");
        ids.push_back(u32(w.barrier_phase.size()));
        w.barrier_phase.push_back(0);
        w.barrier_names.emplace_back();
        w.sizes.barriers = align_up(u32(w.barrier_phase.size()), 8u);
    }
    return ids[nth];
}

void try_complete_phase(WorldImpl& world, Barrier& b) {
    if (b.pending != 0 || b.tx != 0) return;
    ++b.phase;
    ++world.progress;
    b.pending = b.expected;
    if (world.weak_memory) {
        world.sizes.writable(b.gathering).learn_phase(b.id, b.view_phase());
        b.completed = std::move(b.gathering);
        b.gathering = ViewRef();
        b.completed_reads = std::move(b.gathering_reads);
        b.gathering_reads = ViewRef();
    }
    std::vector<Fiber*> still;
    for (Fiber* waiter : b.waiters) {
        if ((b.phase & 1) == waiter->parity) {
            still.push_back(waiter);
            continue;
        }
        waiter->result = 1;
        world.make_ready(waiter);
    }
    b.waiters.swap(still);
}

// An arrival of f that may bring bytes to expect.
void arrive_on(Fiber* f, const Cta& cta, Barrier& b, u32 bytes) {
    WorldImpl& world = *f->world;
    if (b.pending == 0)
        fail(f, FaultKind::Protocol,
             "an arrival on " + barrier_name(*f, cta, b) + " beyond the " + std::to_string(b.expected) +
                 " of its phase " + std::to_string(b.phase));
    b.tx += bytes;
    if (bytes > kMaxTransactionBytes || b.tx > kMaxTransactionBytes)
        fail(f, FaultKind::Protocol, "the transaction count of " + barrier_name(*f, cta, b) + " overflows");
    if (world.weak_memory) {
        const bool own = &cta == f->cta;
        if (!own) remember_visit(f, b, false);
        release_into(f, own ? b.gathering : b.gathering_reads);
        world.sizes.join_into(b.gathering_reads, f->reads);
    }
    --b.pending;
    ++world.progress;
    ++f->cta->grid->counts.mbarrier_arrivals;
    if (b.pending == 0 && b.tx < 0)
        fail(f, FaultKind::Protocol,
             "more bytes have arrived on " + barrier_name(*f, cta, b) + " than phase " + std::to_string(b.phase) +
                 " expects: the transaction count is too small");
    try_complete_phase(world, b);
}

Barrier& waited_barrier(Fiber* f, const u64* p, u32 parity, const char* what) {
    f->world->enter(f);
    if (parity > 1) fail(f, FaultKind::Protocol, what + (" with parity " + std::to_string(parity)));
    return find_barrier(f, *f->cta, p, what);
}

// f has seen that the barrier's last phase has completed.
void see_completed(Fiber* f, const Barrier& b) {
    if (f->world->weak_memory) {
        acquire_view(f, b.completed);
        f->reads = f->world->sizes.join(f->reads, b.completed_reads);
    }
}

}  // namespace

Barrier& find_barrier(Fiber* f, const Cta& cta, const u64* p, const char* what) {
    const u64 offset = u64(p) - u64(cta.shared);
    const u16 slot = offset / 8 < cta.barrier_of.size() && offset % 8 == 0 ? cta.barrier_of[offset / 8] : 0;
    if (slot == 0)
        fail(f, FaultKind::Protocol,
             std::string(what) + " at " + place_name(*f, p) + ": no initialised mbarrier there");
    Barrier& b = *cta.barriers[slot - 1];
    const bool own = b.init_agent == f->warp->agent && b.init_lane == f->lane;
    if (f->world->weak_memory && !own && !f->view->entry(Proxy::Generic, b.init_agent).knows(b.init_lane, b.init_time))
        fail(f, FaultKind::Race,
             std::string(what) + " on " + barrier_name(*f, cta, b) + " is not ordered after its mbarrier_init");
    return b;
}

Barrier& find_async_barrier(Fiber* f, const Cta& cta, const u64* p, const char* what) {
    Barrier& b = find_barrier(f, cta, p, what);
    if (!b.async_visible)
        fail(f, FaultKind::Protocol,
             std::string(what) + " on " + barrier_name(*f, cta, b) +
                 ": fence_mbarrier_init did not follow its mbarrier_init");
    return b;
}

void complete_bytes(WorldImpl& world, Cta& cta, Barrier& b, u32 phase, u32 bytes) {
    if (b.phase != phase) {
        world.fail_copy(cta, FaultKind::Protocol,
                        std::to_string(bytes) + " bytes arrive on " + barrier_name(cta, b) + " in phase " +
                            std::to_string(b.phase) + " but were issued in phase " + std::to_string(phase) +
                            ": the expected transaction count was too small");
        return;
    }
    b.tx -= bytes;
    if (b.tx < -kMaxTransactionBytes || (b.tx < 0 && b.pending == 0)) {
        world.fail_copy(cta, FaultKind::Protocol,
                        "more bytes arrive on " + barrier_name(cta, b) + " than phase " + std::to_string(phase) +
                            " expects (by " + std::to_string(-b.tx) + "): the expected transaction count is too small");
        return;
    }
    try_complete_phase(world, b);
}

u32 api_shared_address(ThreadHead* t, const void* p) {
    Fiber* f = static_cast<Fiber*>(t);
    const u64 offset = u64(p) - u64(f->cta->shared);
    if (offset > f->cta->grid->request->smem_bytes)
        fail(f, FaultKind::OutOfBounds, "shared_address of a pointer that is not into shared memory");
    return kSharedWindow + u32(offset);
}

void api_mbarrier_init(ThreadHead* t, u64* p, u32 arrivals) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (u64(p) % 8 != 0) fail(f, FaultKind::Protocol, "mbarrier_init: misaligned");
    if (arrivals < 1 || arrivals > u32(kMaxTransactionBytes))
        fail(f, FaultKind::Protocol, "mbarrier_init with " + std::to_string(arrivals) + " arrivals");
    const u32 offset = shared_offset(f, p, 8, "mbarrier_init");
    if (f->world->weak_memory) {
        race_write(f, f->cta->shadow, p, 8, generic_actor(*f, {Order::Weak, Scope::Cta, true}));
        f->shared_writes.dirty = true;
    }
    Cta& cta = *f->cta;
    auto b = std::make_unique<Barrier>();
    b->id = barrier_id(f);
    b->offset = offset;
    b->expected = b->pending = arrivals;
    b->base_phase = f->world->barrier_phase[b->id];
    b->init_agent = u16(f->warp->agent);
    b->init_lane = u8(f->lane);
    b->init_time = f->warp->time;
    f->world->barrier_names[b->id] =
        barrier_name(cta, *b) + " of rank " + std::to_string(cta.grid->rank) + " CTA " + std::to_string(cta.index);
    cta.barriers.push_back(std::move(b));
    cta.barrier_of[offset / 8] = u16(cta.barriers.size());
}

void api_fence_mbarrier_init(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    for (auto& b : f->cta->barriers)
        if (b->init_agent == f->warp->agent && b->init_lane == f->lane) b->async_visible = true;
}

void api_mbarrier_arrive(ThreadHead* t, u64* p, u32 bytes) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    arrive_on(f, *f->cta, find_barrier(f, *f->cta, p, "mbarrier_arrive"), bytes);
}

void api_mbarrier_arrive_cluster(ThreadHead* t, u64* p, u32 cta_rank) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    constexpr const char* kWhat = "mbarrier_arrive_cluster";
    const Cta& cta = cluster_cta(f, cta_rank, kWhat);
    arrive_on(f, cta, find_barrier(f, cta, same_place(*f, cta, p), kWhat), 0);
}

bool api_mbarrier_test_wait(ThreadHead* t, u64* p, u32 parity) {
    Fiber* f = static_cast<Fiber*>(t);
    const Barrier& b = waited_barrier(f, p, parity, "mbarrier_test_wait");
    if ((b.phase & 1) == parity) return false;
    see_completed(f, b);
    return true;
}

bool api_mbarrier_try_wait(ThreadHead* t, u64* p, u32 parity) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    Barrier& b = waited_barrier(f, p, parity, "mbarrier_try_wait");
    if ((b.phase & 1) == parity) {
        if (world.random.one_in(32)) return false;  // hardware may give up, too
        f->address = p;
        f->parity = parity;
        b.waiters.push_back(f);
        world.block(f, Wait::MBarrier);
        if (f->result == 0) return false;
    }
    see_completed(f, b);
    f->named_site = false;
    ++f->cta->grid->counts.mbarrier_waits;
    return true;
}

}  // namespace deep_moe::emu
