// Generic-proxy loads, stores and atomics: bounds, order, value.
#include "memory.h"

#include <cstring>

#include "api_functions.h"

namespace deep_moe::emu {

namespace {

[[noreturn]] void out_of_bounds(Fiber* f, const void* p, u64 bytes, const char* what, const std::string& why) {
    fail(f, FaultKind::OutOfBounds,
         std::string(what) + " of " + std::to_string(bytes) + " bytes at " + place_name(*f, p) + ": " + why);
}

const Area* lookup_area(const Grid& grid, const u8* p) {
    u32 low = 0, high = u32(grid.areas.size());
    while (low < high) {  // the first area that begins beyond p
        const u32 middle = (low + high) / 2;
        if (grid.areas[middle].begin <= p)
            low = middle + 1;
        else
            high = middle;
    }
    return low == 0 ? nullptr : &grid.areas[low - 1];
}

std::string neighbours(const Grid& grid, const u8* p) {
    const Area* a = lookup_area(grid, p);
    std::string text;
    if (a)
        text +=
            "the region before is " + a->region->name + ", which ended " + std::to_string(p - a->end) + " bytes ago";
    return text.empty() ? "no region lies before it" : text;
}

void look(Fiber* f, const void* p, const void* value, u32 bytes) {
    u64 v = 0;
    std::memcpy(&v, value, bytes);
    for (Fiber::Look& l : f->looks)
        if (l.address == p) {
            l.value = v;
            l.bytes = bytes;
            return;
        }
    f->looks[f->next_look++ & 3] = {p, v, bytes};
}

// What a store or atomic leaves for those who acquire from its word.
void publish(Fiber* f, const void* p, const MemoryOp& op, bool continues) {
    WorldImpl& w = *f->world;
    if (op.order != Order::Release && op.order != Order::AcqRel) {
        if (!continues) w.sync_words.erase(p);
        return;
    }
    SyncWord& word = w.sync_words[p];
    if (!continues) word = SyncWord{};
    const u32 rank = f->cta->grid->rank;
    ViewRef view = released_view(f);
    if (op.scope == Scope::Sys) {
        // A rank's fences (the ends of its kernels are such) do nothing for the async proxies of others.
        ViewRef generic = w.sizes.copy(view);
        generic->forget_async();
        w.sizes.join_into(word.system, generic);
    }
    for (auto& [of_rank, theirs] : word.ranks)
        if (of_rank == rank) {
            w.sizes.join_into(theirs, view);
            return;
        }
    word.ranks.emplace_back(rank, view);
}

void acquire(Fiber* f, const void* p, const MemoryOp& op) {
    const SyncWord* word = f->world->find_sync(p);
    if (!word) return;
    if (op.scope == Scope::Sys) acquire_view(f, word->system);
    for (const auto& [rank, view] : word->ranks)
        if (rank == f->cta->grid->rank) acquire_view(f, view);
}

// A strong write is about to replace the value.
void keep_old_value(Fiber* f, const void* p, u32 bytes) {
    u64 value = 0;
    std::memcpy(&value, p, bytes);
    f->world->old_values[p] = {value, f->cta, false};
}

// A relaxed load may get an older value, as long as nobody but the writer has seen the new one.
void maybe_stale(Fiber* f, const Shadow& shadow, const void* p, void* value, u32 bytes) {
    auto it = f->world->old_values.find(p);
    if (it == f->world->old_values.end()) return;
    OldValue& old = it->second;
    if (old.gone || old.writer == f->cta || knows_last_write(*f, shadow, p)) return;
    if (f->world->random.one_in(4))
        std::memcpy(value, &old.value, bytes);
    else
        old.gone = true;
}

// Bounds; then the shadow to check, or null when there is nothing to check.
const Shadow* locate(Fiber* f, const void* p, u32 bytes, bool write, const MemoryOp& op, const char* what) {
    if (u64(p) % bytes != 0)
        fail(f, FaultKind::Protocol, std::string(what) + " at " + place_name(*f, p) + " is misaligned");
    if (!op.shared) {
        const Shadow* shadow = find_area(f, p, bytes, write, what).shadow;
        return f->world->weak_memory ? shadow : nullptr;
    }
    const u32 offset = shared_offset(f, p, bytes, what);
    if (!f->world->weak_memory || shared_is_racy(*f, offset)) return nullptr;
    if (write) race_tensor_write(f, *f->cta, offset, bytes);
    return &f->cta->shadow;
}

}  // namespace

const Area& find_area(Fiber* f, const void* p, u64 bytes, bool write, const char* what) {
    const u8* begin = static_cast<const u8*>(p);
    const Area* a = f->recent_area;
    if (!a || begin < a->begin || begin >= a->end) {
        if (begin >= f->cta->shared && begin < f->cta->shared + f->cta->grid->request->smem_bytes)
            out_of_bounds(f, p, bytes, what, "a global access to shared memory");
        a = lookup_area(*f->cta->grid, begin);
        if (!a || begin >= a->end) out_of_bounds(f, p, bytes, what, neighbours(*f->cta->grid, begin));
        f->recent_area = a;
    }
    if (begin + bytes > a->end)
        out_of_bounds(f, p, bytes, what,
                      "runs over the end of " + a->region->name + " (" + std::to_string(a->region->bytes) + " bytes)");
    if (write && !a->region->writable) out_of_bounds(f, p, bytes, what, a->region->name + " is read-only");
    return *a;
}

u32 shared_offset(Fiber* f, const Cta& cta, const void* p, u64 bytes, const char* what) {
    const LaunchRequest& r = *cta.grid->request;
    const u8* begin = static_cast<const u8*>(p);
    if (begin < cta.shared || begin + bytes > cta.shared + r.smem_bytes)
        out_of_bounds(f, p, bytes, what,
                      "not in the CTA's " + std::to_string(r.smem_bytes) + " bytes of shared memory");
    const u32 offset = u32(begin - cta.shared);
    if (!r.smem_fields.empty()) {
        const u16 field = cta.grid->field_of[offset / 16];
        if (field == 0) out_of_bounds(f, p, bytes, what, "between the fields of shared memory");
        const SmemField& s = r.smem_fields[field - 1];
        if (offset < s.offset || offset + bytes > u64(s.offset) + s.bytes)
            out_of_bounds(f, p, bytes, what,
                          "runs over the end of " + s.name + " (" + std::to_string(s.bytes) + " bytes)");
    }
    for (u32 word = offset / 8; word < (offset + bytes + 7) / 8; ++word)
        if (cta.barrier_of[word] != 0)
            fail(f, FaultKind::Protocol,
                 std::string(what) + " touches the mbarrier " +
                     barrier_name(cta, *cta.barriers[cta.barrier_of[word] - 1]) + " as data");
    return offset;
}

bool shared_is_racy(const Fiber& f, u32 offset) {
    const u16 field = f.cta->grid->field_of[offset / 16];
    return field != 0 && f.cta->grid->request->smem_fields[field - 1].racy;
}

void api_load(ThreadHead* t, const void* p, void* value, u32 bytes, MemoryOp op) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    const Shadow* shadow = locate(f, p, bytes, false, op, op.shared ? "shared load" : "load");
    if (shadow) race_read(f, *shadow, p, bytes, generic_actor(*f, op));
    std::memcpy(value, p, bytes);
    if (shadow && !op.shared && op.order == Order::Relaxed) maybe_stale(f, *shadow, p, value, bytes);
    if (bytes <= 8) look(f, p, value, bytes);
    if (shadow && op.order == Order::Acquire) acquire(f, p, op);
}

void api_store(ThreadHead* t, void* p, const void* value, u32 bytes, MemoryOp op) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    const Shadow* shadow = locate(f, p, bytes, true, op, op.shared ? "shared store" : "store");
    if (shadow) {
        const bool was_strong = race_write(f, *shadow, p, bytes, generic_actor(*f, op));
        (op.shared ? f->shared_writes : f->global_writes).dirty = true;
        if (was_strong || op.order == Order::Release) publish(f, p, op, false);
        if (!op.shared && op.order != Order::Weak)
            keep_old_value(f, p, bytes);
        else if (was_strong)
            f->world->old_values.erase(p);
    }
    std::memcpy(p, value, bytes);
    f->world->wrote(p);
    if (bytes == 16) f->world->wrote(static_cast<u8*>(p) + 8);
}

u64 api_read_modify_write(ThreadHead* t, void* p, u32 bytes, Rmw rmw, u64 expected, u64 operand, MemoryOp op) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    const Shadow* shadow = locate(f, p, bytes, true, op, op.shared ? "shared atomic" : "atomic");
    if (shadow) {
        race_write(f, *shadow, p, bytes, generic_actor(*f, op));
        (op.shared ? f->shared_writes : f->global_writes).dirty = true;
        if (op.order == Order::AcqRel) acquire(f, p, op);
        publish(f, p, op, true);
        if (!op.shared) keep_old_value(f, p, bytes);
    }
    u64 old = 0;
    std::memcpy(&old, p, bytes);
    u64 desired = rmw == Rmw::Add ? old + operand : old == expected ? operand : old;
    std::memcpy(p, &desired, bytes);
    f->world->wrote(p);
    return old;
}

void api_fence_proxy_async(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (f->world->weak_memory) fence_async(f);
}

void api_fence_proxy_async_shared(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (f->world->weak_memory) fence_async_shared(f);
}

}  // namespace deep_moe::emu
