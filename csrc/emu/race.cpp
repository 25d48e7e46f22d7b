#include "race.h"

#include <cstring>

namespace deep_moe::emu {

namespace {

bool strong(StampKind kind) { return kind == StampKind::StrongGpu || kind == StampKind::StrongSys; }

// Two strong accesses whose scopes include each other never race.
bool morally_strong(const Fiber& f, const Actor& actor, StampKind kind, u32 agent) {
    if (!strong(actor.kind) || !strong(kind)) return false;
    if (f.world->agent_rank[agent] == f.cta->grid->rank) return true;
    return actor.kind == StampKind::StrongSys && kind == StampKind::StrongSys;
}

bool knows(const Fiber& f, const Stamp& s, Proxy proxy) {
    switch (s.kind) {
        case StampKind::Weak:
        case StampKind::StrongGpu:
        case StampKind::StrongSys:
        case StampKind::Settled:
            if (s.agent == f.warp->agent && s.lane == f.lane)
                return proxy == Proxy::Generic || s.kind == StampKind::Settled || f.writes(proxy).visible(s.time);
            return f.view->entry(proxy, s.agent).knows(s.lane, s.time);
        case StampKind::Barrier: return f.view->phase(s.agent) >= s.time;
        case StampKind::Pending: return false;
        default: return true;
    }
}

// Lanes of an agent whose accesses up to `time` the view orders.
u32 known_lanes(const ViewRef& view, u32 agent, u32 time) {
    if (!view) return 0;
    const Entry e = view->entry(Proxy::Generic, agent);
    return time <= e.all ? ~0u : time <= e.mask_time ? e.mask : 0;
}

// handed_back: arrivals from other CTAs count, which order reads of shared memory before a load into it.
bool knows_read(const Fiber& f, const ReadStamp& r, bool handed_back = false) {
    if (r.kind == StampKind::None) return true;
    if (r.kind == StampKind::Barrier) return f.view->phase(r.agent) >= r.time;
    if (r.kind == StampKind::Pending) return false;
    u32 known = known_lanes(f.view, r.agent, r.time);
    if (handed_back) known |= known_lanes(f.reads, r.agent, r.time);
    if (r.agent == f.warp->agent) known |= 1u << f.lane;
    return (r.lanes & ~known) == 0;
}

// A load overwrites what an earlier one has brought, whose reader has handed the place back from another CTA.
bool is_handed_back(const Fiber& f, const Actor& actor, const Stamp& s) {
    return actor.kind == StampKind::Barrier && s.kind == StampKind::Barrier && f.reads &&
           f.reads->phase(s.agent) >= s.time;
}

const char* proxy_word(const Actor& a) {
    if (a.kind == StampKind::Barrier) return "asynchronous load's ";
    if (a.kind == StampKind::Pending) return "bulk store's ";
    return a.proxy == Proxy::AsyncShared ? "wgmma's " : "";
}

std::string stamp_text(const WorldImpl& w, StampKind kind, u32 agent, u32 lanes, const char* what) {
    if (kind == StampKind::Barrier)
        return std::string("the ") + what + " by an asynchronous load that completes on " + w.barrier_names[agent];
    const char* order = kind == StampKind::Pending ? " of a bulk store in flight" : strong(kind) ? " (strong)" : "";
    std::string who = w.agent_names[agent];
    if ((lanes & (lanes - 1)) == 0) who += " lane " + std::to_string(__builtin_ctz(lanes | 1u << 31));
    return std::string("the ") + what + order + " by " + who;
}

[[noreturn]] void race(Fiber* f, const Actor& actor, const void* p, const char* mine, StampKind kind, u32 agent,
                       u32 lanes, const char* theirs, bool only_proxy) {
    std::string text = "race on " + place_name(*f, p) + ": this thread's " + proxy_word(actor) + mine;
    const std::string other = stamp_text(*f->world, kind, agent, lanes, theirs);
    if (only_proxy)
        text += " comes after " + other + ", but no " +
                (actor.proxy == Proxy::AsyncShared ? "fence_proxy_async_shared" : "fence_proxy_async") +
                " lies between the generic and the async access";
    else if (strong(kind) && strong(actor.kind))
        text += " and " + other + " have scopes that do not include each other, and nothing else orders them";
    else
        text += " is not ordered after " + other;
    fail(f, FaultKind::Race, text);
}

void check_write_stamp(Fiber* f, const Actor& actor, const Stamp& s, const void* p, const char* mine) {
    if (morally_strong(*f, actor, s.kind, s.kind == StampKind::Barrier ? 0 : s.agent)) return;
    if (!knows(*f, s, Proxy::Generic)) race(f, actor, p, mine, s.kind, s.agent, 1u << s.lane, "write", false);
    if (actor.proxy != Proxy::Generic && !knows(*f, s, actor.proxy))
        race(f, actor, p, mine, s.kind, s.agent, 1u << s.lane, "write", true);
}

void record_read(Fiber* f, Cell& c, const Actor& a, u8 bytes) {
    for (ReadStamp& r : c.reads) {
        if (r.kind != StampKind::None && (r.agent != a.agent || r.kind != a.kind)) continue;
        const bool fresh = r.kind == StampKind::None;
        r = {fresh ? a.time : max_of(r.time, a.time), a.agent, a.kind, u8(fresh ? bytes : r.bytes | bytes),
             fresh ? a.lanes : r.lanes | a.lanes};
        return;
    }
    // Both places are taken: forget one that is ordered before this thread, or any.
    const u32 victim = knows_read(*f, c.reads[0]) ? 0 : knows_read(*f, c.reads[1]) ? 1 : a.time & 1;
    c.reads[victim] = {a.time, a.agent, a.kind, bytes, a.lanes};
}

u8 byte_mask(u64 address, u64 end, u64 cell_address) {
    const u64 from = address > cell_address ? address - cell_address : 0;
    const u64 to = end < cell_address + kCellBytes ? end - cell_address : kCellBytes;
    return u8(((1u << to) - 1) & ~((1u << from) - 1));
}

Stamp make_stamp(u32 time, u16 agent, u8 lane, StampKind kind, u8 bytes) {
    Stamp s;
    s.time = time;
    s.agent = agent;
    s.lane = lane;
    s.kind = kind;
    s.bytes = bytes & 15;
    return s;
}

u64 bits(const Stamp& s) {
    u64 value;
    std::memcpy(&value, &s, 8);
    return value;
}

}  // namespace

Actor generic_actor(const Fiber& f, const MemoryOp& op) {
    const StampKind kind = op.order == Order::Weak  ? StampKind::Weak
                           : op.scope == Scope::Sys ? StampKind::StrongSys
                                                    : StampKind::StrongGpu;
    return {kind, Proxy::Generic, u16(f.warp->agent), u8(f.lane), f.warp->time, 1u << f.lane};
}

Actor barrier_actor(const Barrier& b, Proxy proxy) {
    return {StampKind::Barrier, proxy, u16(b.id), 0, b.view_phase() + 1, ~0u};
}

Actor pending_actor(const Fiber& f, Proxy proxy) {
    return {StampKind::Pending, proxy, u16(f.warp->agent), u8(f.lane), f.warp->time, 1u << f.lane};
}

void race_read(Fiber* f, const Shadow& shadow, const void* p, u64 bytes, const Actor& actor) {
    const u64 begin = u64(p), end = begin + bytes;
    Cell* c = shadow.cell(p);
    u64 ordered = 0;  // a stamp that has been checked
    for (u64 a = begin & ~u64(kCellBytes - 1); a < end; a += kCellBytes, ++c) {
        const u8 mask = byte_mask(begin, end, a);
        if (c->write.kind != StampKind::None && (c->write.bytes & mask) && bits(c->write) != ordered) {
            check_write_stamp(f, actor, c->write, reinterpret_cast<const void*>(a), "read");
            ordered = bits(c->write);
        }
        record_read(f, *c, actor, mask);
    }
}

bool race_write(Fiber* f, const Shadow& shadow, const void* p, u64 bytes, const Actor& actor) {
    const u64 begin = u64(p), end = begin + bytes;
    Cell* c = shadow.cell(p);
    u64 ordered = 0;
    bool was_strong = false;
    for (u64 a = begin & ~u64(kCellBytes - 1); a < end; a += kCellBytes, ++c) {
        const u8 mask = byte_mask(begin, end, a);
        const void* here = reinterpret_cast<const void*>(a);
        if (c->write.kind != StampKind::None && (c->write.bytes & mask)) {
            was_strong = was_strong || strong(c->write.kind);
            if (bits(c->write) != ordered) {
                if (!is_handed_back(*f, actor, c->write)) check_write_stamp(f, actor, c->write, here, "write");
                ordered = bits(c->write);
            }
        }
        for (ReadStamp& r : c->reads) {
            if (r.kind == StampKind::None || !(r.bytes & mask)) continue;
            if (!morally_strong(*f, actor, r.kind, r.kind == StampKind::Barrier ? 0 : r.agent) &&
                !knows_read(*f, r, actor.kind == StampKind::Barrier))
                race(f, actor, here, "write", r.kind, r.agent, r.lanes, "read", false);
            r.kind = StampKind::None;
        }
        c->write = make_stamp(actor.time, actor.agent, actor.lane, actor.kind, mask);
    }
    return was_strong;
}

bool knows_last_write(const Fiber& f, const Shadow& shadow, const void* p) {
    return knows(f, shadow.cell(p)->write, Proxy::Generic);
}

void race_tensor_read(Fiber* lane, const void* p, u32 bytes) {
    const Actor actor{StampKind::Weak, Proxy::AsyncShared, u16(lane->warp->agent),
                      u8(lane->lane),  lane->warp->time,   1u << lane->lane};
    const Cell* c = lane->cta->shadow.cell(p);
    u64 ordered = 0;
    for (u32 i = 0; i < bytes; i += kCellBytes, ++c) {
        if (c->write.kind == StampKind::None || bits(c->write) == ordered) continue;
        if (!knows(*lane, c->write, Proxy::Generic) || !knows(*lane, c->write, Proxy::AsyncShared))
            check_write_stamp(lane, actor, c->write, static_cast<const u8*>(p) + i, "read");
        ordered = bits(c->write);
    }
}

void race_tensor_write(Fiber* f, const Cta& cta, u32 offset, u64 bytes) {
    for (u32 g = offset / 16; g < (offset + bytes + 15) / 16; ++g) {
        const TensorReads& reads = cta.tensor_reads[g];
        if (reads.in_flight != 0)
            fail(f, FaultKind::Race,
                 "race on " + place_name(*f, cta.shared + 16 * g) +
                     ": written while a wgmma in flight reads it (no wgmma_wait yet)");
        for (u32 w = 0; w < cta.warps.size(); ++w) {
            const u32 time = reads.last[w], agent = cta.warps[w].agent;
            if (time == 0 || agent == f->warp->agent) continue;
            if (known_lanes(f->view, agent, time) == 0 && known_lanes(f->reads, agent, time) == 0)
                fail(f, FaultKind::Race,
                     "race on " + place_name(*f, cta.shared + 16 * g) +
                         ": this thread's write is not ordered after the wgmma read by " +
                         f->world->agent_names[agent]);
        }
    }
}

void settle_bulk_store(Fiber* f, const BulkStore& store) {
    const u32 time = f->warp->time;
    const u16 agent = u16(f->warp->agent);
    Cell* c = store.shadow ? store.shadow->cell(store.global) : nullptr;
    for (u32 i = 0; c && i < store.bytes; i += kCellBytes, ++c)
        if (c->write.kind == StampKind::Pending && c->write.agent == agent && c->write.lane == f->lane)
            c->write = make_stamp(time, agent, u8(f->lane), StampKind::Settled, 15);
    c = f->cta->shadow.cell(store.shared);
    for (u32 i = 0; i < store.bytes; i += kCellBytes, ++c)
        for (ReadStamp& r : c->reads)
            if (r.kind == StampKind::Pending && r.agent == agent && (r.lanes >> f->lane & 1))
                r = {time, agent, StampKind::Weak, 15, 1u << f->lane};
    f->global_writes.dirty = true;  // the async proxy of others needs a fence before it sees what the store wrote
}

std::string place_name(const Fiber& f, const void* p) {
    const Cta& cta = *f.cta;
    const u8* at = static_cast<const u8*>(p);
    const LaunchRequest& r = *cta.grid->request;
    for (const Cta* other : cta.cluster->ctas) {
        if (at < other->shared || at >= other->shared + r.smem_bytes) continue;
        const std::string owner = other == &cta ? "" : "CTA " + std::to_string(other->index) + " ";
        const u32 offset = u32(at - other->shared);
        for (const SmemField& s : r.smem_fields)
            if (offset >= s.offset && offset < s.offset + s.bytes)
                return owner + "shared " + s.name + "+" + std::to_string(offset - s.offset);
        return owner + "shared memory+" + std::to_string(offset);
    }
    for (const Area& a : cta.grid->areas) {
        if (at < a.begin || at >= a.end) continue;
        const std::string owner = a.region->rank >= 0 ? "rank " + std::to_string(a.region->rank) + " " : "";
        return owner + a.region->name + "+" + std::to_string(at - a.begin);
    }
    return "an address outside every region";
}

}  // namespace deep_moe::emu
