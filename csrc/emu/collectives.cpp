// Warp, warpgroup and CTA collectives; polling; the table of functions.
#include "collectives.h"

#include <cstring>

#include "api_functions.h"

namespace deep_moe::emu {

namespace {

void complete_warp(Warp& w, Collective op, WorldImpl& world) {
    u32 votes = 0;
    for (u32 lane = 0; lane < kWarpSize; ++lane) votes |= u32(w.values[lane] != 0) << lane;
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
        const u32 argument = w.arguments[lane];
        u64& result = w.lanes[lane]->result;
        switch (op) {
            case Collective::Shfl: result = w.values[argument % kWarpSize]; break;
            case Collective::ShflXor: result = w.values[(lane ^ argument) % kWarpSize]; break;
            case Collective::ShflUp: result = lane >= argument ? w.values[lane - argument] : w.values[lane]; break;
            case Collective::Ballot: result = votes; break;
            case Collective::AllLanes: result = votes == ~0u; break;
            default: result = 0;
        }
    }
    // Only a barrier orders memory; shuffles and votes do not.
    if (op == Collective::SyncWarp && world.weak_memory) meet(world, &w, 1);
}

u64 warp_collective(Fiber* f, Collective op, u64 value, u32 argument) {
    Warp& w = *f->warp;
    if (w.exited != 0) fail(f, FaultKind::Protocol, collective_text(op) + " after lanes of the warp have ended");
    const bool last = arrive(f, w.meeting, op, 0, 0, kWarpSize, true);
    w.values[f->lane] = value;
    w.arguments[f->lane] = argument;
    w.arrived |= 1u << f->lane;
    if (!last) {
        f->world->block(f, Wait::Collective);
        return f->result;
    }
    w.arrived = 0;
    complete_warp(w, op, *f->world);
    wake_others(f, {&w, 1});
    return f->result;
}

void block_collective(Fiber* f) {
    Cta& cta = *f->cta;
    if (cta.live != cta.fibers.size()) fail(f, FaultKind::Protocol, "sync_block after threads of the CTA have ended");
    if (!arrive(f, cta.block_meeting, Collective::SyncBlock, 0, 0, u32(cta.fibers.size()), true)) {
        f->world->block(f, Wait::Collective);
        return;
    }
    if (f->world->weak_memory) meet(*f->world, cta.warps.data(), u32(cta.warps.size()));
    wake_others(f, {cta.warps.data(), u32(cta.warps.size())});
}

// Gives registers to warpgroups that wait for them.
void grant_registers(Fiber* f) {
    Cta& cta = *f->cta;
    for (u32 i = 0; i < cta.warpgroups.size(); ++i) {
        Warpgroup& wg = cta.warpgroups[i];
        if (wg.wants == 0 || wg.wants - wg.registers > cta.free_registers) continue;
        cta.free_registers -= wg.wants - wg.registers;
        wg.registers = wg.wants;
        wg.wants = 0;
        wake_others(f, {&cta.warps[4 * i], 4});
    }
}

void change_registers(Fiber* f, bool raise, u32 registers) {
    Cta& cta = *f->cta;
    Warpgroup& wg = warpgroup_of(f);
    if (registers % 8 != 0 || registers < 24 || registers > 256)
        fail(f, FaultKind::Protocol, "setmaxnreg wants a multiple of 8 in 24..256, not " + std::to_string(registers));
    if (raise ? registers < wg.registers : registers > wg.registers)
        fail(f, FaultKind::Protocol,
             std::string(raise ? "raise" : "lower") + "_max_registers to " + std::to_string(registers) + " from " +
                 std::to_string(wg.registers));
    if (raise) {
        wg.wants = registers;
    } else {
        cta.free_registers += wg.registers - registers;
        wg.registers = registers;
        wake_others(f, warpgroup_warps(f));
    }
    grant_registers(f);
    if (raise && wg.wants != 0) f->world->block(f, Wait::Collective);
}

void warpgroup_collective(Fiber* f, Collective op, u64 value, u32 argument) {
    Warpgroup& wg = warpgroup_of(f);
    if (!arrive(f, wg.meeting, op, value, argument, kWarpgroupSize, true)) {
        f->world->block(f, Wait::Collective);
        return;
    }
    if (op == Collective::SetMaxRegisters) {
        change_registers(f, value != 0, argument);
        return;
    }
    complete_wgmma_collective(f, op, argument);
    wake_others(f, warpgroup_warps(f));
}

}  // namespace

bool arrive(Fiber* f, Meeting& m, Collective op, u64 value, u32 argument, u32 size, bool uniform) {
    if (m.count == 0) m = {op, 0, size, value, argument};
    f->meeting = &m;
    if (m.op != op)
        fail(f, FaultKind::Protocol,
             "divergence: this thread is at " + collective_text(op) + " while " + std::to_string(m.count) +
                 " others wait at " + collective_text(m.op));
    if (uniform && (m.value != value || m.argument != argument))
        fail(f, FaultKind::Protocol, "divergence: the lanes bring different arguments to " + collective_text(op));
    if (++m.count < size) return false;
    m.count = 0;
    return true;
}

WarpRange warpgroup_warps(Fiber* f) { return {&f->cta->warps[f->warp->index / 4 * 4], 4}; }
Warpgroup& warpgroup_of(Fiber* f) { return f->cta->warpgroups[f->warp->index / 4]; }

void wake_others(Fiber* f, WarpRange warps) {
    for (Warp* w = warps.first; w < warps.first + warps.count; ++w)
        for (Fiber* lane : w->lanes)
            if (lane != f && lane->wait == Wait::Collective) f->world->make_ready(lane);
}

u64 api_collective(ThreadHead* t, Collective op, u64 value, u32 argument) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (op < Collective::SyncBlock) return warp_collective(f, op, value, argument);
    if (op == Collective::SyncBlock) {
        block_collective(f);
    } else if (op == Collective::SyncCluster) {
        cluster_collective(f);
    } else {
        if (f->cta->fibers.size() % kWarpgroupSize != 0)
            fail(f, FaultKind::Protocol, collective_text(op) + " needs whole warpgroups");
        warpgroup_collective(f, op, value, argument);
    }
    return 0;
}

u64 api_timer_ns(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    return f->world->now_ns();
}

void api_poll_pause(ThreadHead* t, u32 site, u32 index, const void* address) {
    Fiber* f = static_cast<Fiber*>(t);
    WorldImpl& world = *f->world;
    ++world.step;
    f->named_site = true;
    f->site = site;
    f->index = index;
    for (const Fiber::Look& look : f->looks) {
        if (look.address != address || look.bytes == 0) continue;
        u64 now = 0;
        std::memcpy(&now, address, look.bytes);
        if (now != look.value) break;  // it has changed since: look again soon
        world.park(f, address);
        return;
    }
    world.preempt(f);
}

void api_exit_thread(ThreadHead* t) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->finish(f);
}

const Api kApi = {
    .collective = api_collective,
    .load = api_load,
    .store = api_store,
    .read_modify_write = api_read_modify_write,
    .fence_proxy_async = api_fence_proxy_async,
    .fence_proxy_async_shared = api_fence_proxy_async_shared,
    .shared_address = api_shared_address,
    .mbarrier_init = api_mbarrier_init,
    .fence_mbarrier_init = api_fence_mbarrier_init,
    .mbarrier_arrive = api_mbarrier_arrive,
    .mbarrier_arrive_cluster = api_mbarrier_arrive_cluster,
    .mbarrier_test_wait = api_mbarrier_test_wait,
    .mbarrier_try_wait = api_mbarrier_try_wait,
    .bulk_load = api_bulk_load,
    .bulk_store = api_bulk_store,
    .prefetch = api_prefetch,
    .bulk_commit = api_bulk_commit,
    .bulk_wait = api_bulk_wait,
    .tma_load = api_tma_load,
    .wgmma = api_wgmma,
    .timer_ns = api_timer_ns,
    .poll_pause = api_poll_pause,
    .exit_thread = api_exit_thread,
};

}  // namespace deep_moe::emu
