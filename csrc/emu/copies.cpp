// Bulk copies and TMA loads: checked when they are issued, performed when they complete.
#include <cstring>

#include "api_functions.h"
#include "async.h"

namespace deep_moe::emu {

namespace {

constexpr u8 kPoison = 0xff;  // what a destination holds until the data is there

void check_bulk(Fiber* f, const void* shared, const void* global, u32 bytes, const char* what) {
    if (bytes == 0 || bytes % 16 != 0 || u64(shared) % 16 != 0 || u64(global) % 16 != 0)
        fail(f, FaultKind::Protocol,
             std::string(what) + " of " + std::to_string(bytes) + " bytes between " + place_name(*f, global) + " and " +
                 place_name(*f, shared) + ": addresses and size must be multiples of 16");
}

// An asynchronous load into the CTAs of `cta_mask`, each of which is a copy of its own that lands when it likes.
// read(actor): what the load reads, completing on a barrier.
template <typename Read>
void issue_load(Fiber* f, Copy copy, u64* barrier, u32 cta_mask, const char* what, const Read& read) {
    WorldImpl& world = *f->world;
    if (cta_mask == 0) fail(f, FaultKind::Protocol, std::string(what) + " into no CTA");
    for (u32 rank = 0; cta_mask >> rank != 0; ++rank) {
        if (!(cta_mask >> rank & 1)) continue;
        Cta& cta = cluster_cta(f, rank, what);
        Barrier& b = find_async_barrier(f, cta, same_place(*f, cta, barrier), what);
        Copy c = copy;
        c.cta = &cta;
        c.issuer = f->cta;
        c.shared = same_place(*f, cta, copy.shared);
        c.barrier = &b;
        c.phase = b.phase;
        const u32 offset = shared_offset(f, cta, c.shared, c.bytes, what);
        read(barrier_actor(b, Proxy::AsyncGlobal));
        if (world.weak_memory) {
            race_tensor_write(f, cta, offset, c.bytes);
            race_write(f, cta.shadow, c.shared, c.bytes, barrier_actor(b, Proxy::AsyncShared));
            if (&cta != f->cta) remember_visit(f, b, true);
        }
        if (world.async_effects) std::memset(c.shared, kPoison, c.bytes);
        world.add_copy(c);
    }
}

u32 swizzle_128(u32 address) { return address ^ (address >> 3 & 0x70); }

void perform_tma(const Copy& c) {
    TensorMapImage m;
    std::memcpy(&m, c.map, sizeof(m));
    const u32 start = u32(c.shared - c.cta->shared);
    for_box_rows(m, c.coordinates, [&](const u8* row, u32 offset, u32 first, u32 bytes) {
        u8 line[128] = {};
        if (row) std::memcpy(line + first, row, bytes);
        for (u32 chunk = 0; chunk < m.box[0]; chunk += 16)
            std::memcpy(c.cta->shared + swizzle_128(start + offset + chunk), line + chunk, 16);
    });
}

void complete_store(WorldImpl& world, const Copy& c) {
    Fiber* f = c.fiber;
    for (BulkStore& s : f->bulk->stores)
        if (s.serial == c.phase) s.completed = true;
    if (f->wait == Wait::BulkGroup) world.make_ready(f);
}

}  // namespace

void complete_copy(WorldImpl& world, const Copy& c) {
    switch (c.kind) {
        case Copy::Kind::BulkLoad: std::memcpy(c.shared, c.global, c.bytes); break;
        case Copy::Kind::Tma: perform_tma(c); break;
        case Copy::Kind::BulkStore:
            std::memcpy(c.global, c.shared, c.bytes);
            for (u32 i = 0; i < c.bytes; i += 8) world.wrote(c.global + i);
            complete_store(world, c);
            return;
    }
    complete_bytes(world, *c.cta, *c.barrier, c.phase, c.bytes);
}

void api_bulk_load(ThreadHead* t, void* shared, const void* global, u32 bytes, u64* barrier, u32 cta_mask) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    world.enter(f);
    check_bulk(f, shared, global, bytes, "bulk_load");
    const Area& area = find_area(f, global, bytes, false, "bulk_load");
    ++f->cta->grid->counts.bulk_loads;
    Copy c{};
    c.kind = Copy::Kind::BulkLoad;
    c.shared = static_cast<u8*>(shared);
    c.global = static_cast<u8*>(const_cast<void*>(global));
    c.bytes = bytes;
    issue_load(f, c, barrier, cta_mask, "bulk_load", [&](const Actor& actor) {
        if (world.weak_memory && area.shadow) race_read(f, *area.shadow, global, bytes, actor);
    });
}

void api_prefetch(ThreadHead* t, const void* global) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    find_area(f, global, 1, false, "prefetch");
}

void api_bulk_store(ThreadHead* t, void* global, const void* shared, u32 bytes) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    world.enter(f);
    check_bulk(f, shared, global, bytes, "bulk_store");
    const Area& area = find_area(f, global, bytes, true, "bulk_store");
    shared_offset(f, shared, bytes, "bulk_store");
    if (world.weak_memory) {
        race_read(f, f->cta->shadow, shared, bytes, pending_actor(*f, Proxy::AsyncShared));
        if (area.shadow) race_write(f, *area.shadow, global, bytes, pending_actor(*f, Proxy::AsyncGlobal));
    }
    if (!f->bulk) f->bulk = std::make_unique<BulkGroups>();
    BulkGroups& groups = *f->bulk;
    u8* source = static_cast<u8*>(const_cast<void*>(shared));
    groups.stores.push_back(
        {static_cast<u8*>(global), source, bytes, groups.open, groups.next_serial, false, area.shadow});
    ++f->cta->grid->counts.bulk_stores;
    Copy c{};
    c.kind = Copy::Kind::BulkStore;
    c.cta = c.issuer = f->cta;
    c.shared = source;
    c.global = static_cast<u8*>(global);
    c.bytes = bytes;
    c.phase = groups.next_serial++;
    c.fiber = f;
    world.add_copy(c);
}

void api_bulk_commit(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (!f->bulk) f->bulk = std::make_unique<BulkGroups>();
    ++f->bulk->open;
}

void api_bulk_wait(ThreadHead* t, u32 pending) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    world.enter(f);
    if (!f->bulk) return;
    BulkGroups& groups = *f->bulk;
    auto due = [&](const BulkStore& s) { return s.group + pending < groups.open; };
    f->parity = pending;
    for (;;) {
        bool all = true;
        for (const BulkStore& s : groups.stores) all = all && (!due(s) || s.completed);
        if (all) break;
        world.block(f, Wait::BulkGroup);
    }
    std::vector<BulkStore> rest;
    for (const BulkStore& s : groups.stores) {
        if (!due(s))
            rest.push_back(s);
        else if (world.weak_memory)
            settle_bulk_store(f, s);
    }
    groups.stores.swap(rest);
}

void api_tma_load(ThreadHead* t, void* shared, const TensorMap* map, u32 rank, const u32* coordinates, u64* barrier,
                  u32 cta_mask) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    world.enter(f);
    const TensorMapImage& m = decode_tensor_map(f, map, rank);
    if (u64(shared) % 128 != 0)
        fail(f, FaultKind::Protocol,
             "tma_load to " + place_name(*f, shared) + ": the destination must be 128-byte aligned");
    ++f->cta->grid->counts.tma_loads;
    Copy c{};
    c.kind = Copy::Kind::Tma;
    c.shared = static_cast<u8*>(shared);
    c.bytes = m.box[0] * m.box[1] * (rank == 3 ? m.box[2] : 1);
    c.map = map;
    std::memcpy(c.coordinates, coordinates, sizeof(c.coordinates));
    issue_load(f, c, barrier, cta_mask, "tma_load", [&](const Actor& actor) {
        for_box_rows(m, coordinates, [&](const u8* row, u32, u32, u32 length) {
            if (!row) return;
            const Area& area = find_area(f, row, length, false, "tma_load");
            if (world.weak_memory && area.shadow) race_read(f, *area.shadow, row, length, actor);
        });
    });
}

}  // namespace deep_moe::emu
