// The deadlock report: what every warp waits for.
#include <map>

#include "scheduler.h"

namespace deep_moe::emu {

namespace {

const char* site_name(u32 site) {
    switch (WaitSite(site)) {
        case WaitSite::RouteCounts: return "RouteCounts";
        case WaitSite::CountFlag: return "CountFlag";
        case WaitSite::RingSlot: return "RingSlot";
        case WaitSite::RowsArrived: return "RowsArrived";
        case WaitSite::L1Done: return "L1Done";
        case WaitSite::DoneFlag: return "DoneFlag";
        case WaitSite::Pipeline: return "Pipeline";
        case WaitSite::DecodedChunk: return "DecodedChunk";
        case WaitSite::DecodedSlot: return "DecodedSlot";
        default: return "site";
    }
}

const char* collective_name(Collective op) {
    switch (op) {
        case Collective::SyncWarp: return "sync_warp";
        case Collective::Shfl: return "shfl";
        case Collective::ShflXor: return "shfl_xor";
        case Collective::ShflUp: return "shfl_up";
        case Collective::Ballot: return "ballot";
        case Collective::AllLanes: return "all_lanes";
        case Collective::SyncBlock: return "sync_block";
        case Collective::SyncCluster: return "sync_cluster";
        case Collective::SetMaxRegisters: return "set max registers";
        case Collective::WgmmaFence: return "wgmma_fence";
        case Collective::WgmmaCommit: return "wgmma_commit";
        case Collective::WgmmaWait: return "wgmma_wait";
        case Collective::Wgmma: return "wgmma";
        default: return "nothing";
    }
}

std::string where(const Fiber& f, const void* p) {
    for (const Area& a : f.cta->grid->areas) {
        if (p < a.begin || p >= a.end) continue;
        const std::string owner = a.region->rank >= 0 ? "rank " + std::to_string(a.region->rank) + " " : "";
        return owner + a.region->name + "+" + std::to_string(static_cast<const u8*>(p) - a.begin);
    }
    return "unknown address";
}

u64 seen_value(const Fiber& f, const void* p) {
    for (const Fiber::Look& look : f.looks)
        if (look.address == p) return look.value;
    return 0;
}

std::string describe_barrier(const Fiber& f) {
    const Cta& cta = *f.cta;
    const u32 offset = u32(static_cast<const u8*>(f.address) - cta.shared);
    const u16 slot = offset / 8 < cta.barrier_of.size() ? cta.barrier_of[offset / 8] : 0;
    if (slot == 0) return "a barrier that is not initialised";
    const Barrier& b = *cta.barriers[slot - 1];
    return barrier_name(cta, b) + " parity " + std::to_string(f.parity) + ": in phase " + std::to_string(b.phase) +
           ", pending arrivals " + std::to_string(b.pending) + " of " + std::to_string(b.expected) +
           ", pending bytes " + std::to_string(b.tx);
}

std::string describe(const Fiber& f) {
    const std::string site =
        f.named_site ? " [" + std::string(site_name(f.site)) + " " + std::to_string(f.index) + "]" : "";
    switch (f.wait) {
        case Wait::MBarrier: return "mbarrier_try_wait on " + describe_barrier(f) + site;
        case Wait::Poll:
            return "polls " + where(f, f.address) + ", last seen " + std::to_string(seen_value(f, f.address)) + site;
        case Wait::BulkGroup: return "bulk_wait until " + std::to_string(f.parity) + " groups are pending";
        case Wait::Collective:
            return std::string(collective_name(f.meeting->op)) + ": " + std::to_string(f.meeting->count) + " of " +
                   std::to_string(f.meeting->size) + " threads have arrived";
        case Wait::Done: return "ended";
        default: return "can run";
    }
}

std::string lane_list(u32 mask) {
    if (mask == ~0u) return "";
    std::string text = " lanes";
    for (u32 i = 0; i < kWarpSize; ++i) {
        if (!(mask >> i & 1)) continue;
        u32 last = i;
        while (last + 1 < kWarpSize && (mask >> (last + 1) & 1)) ++last;
        text += " " + std::to_string(i) + (last > i ? "-" + std::to_string(last) : "");
        i = last;
    }
    return text;
}

}  // namespace

std::string collective_text(Collective op) { return collective_name(op); }

std::string cta_name(const Cta& cta) {
    const std::string name = "CTA " + std::to_string(cta.index);
    const std::vector<Cta*>& all = cta.cluster->ctas;
    if (all.size() == 1) return name;
    return name + " (cluster of CTAs " + std::to_string(all.front()->index) + "-" + std::to_string(all.back()->index) +
           ")";
}

std::string barrier_name(const Cta& cta, const Barrier& b) {
    for (const SmemField& f : cta.grid->request->smem_fields)
        if (b.offset >= f.offset && b.offset < f.offset + f.bytes)
            return f.name + "[" + std::to_string((b.offset - f.offset) / 8) + "]";
    return "barrier at shared offset " + std::to_string(b.offset);
}

std::string stall_report(WorldImpl& world) {
    std::string text = "deadlock: nothing can run and nothing is in flight\n";
    for (u32 r = 0; r < world.ranks.size(); ++r) {
        const RankState& rank = world.ranks[r];
        if (!rank.running || !rank.running->grid) {
            text += "rank " + std::to_string(r) + (rank.ended ? " has ended: " + rank.why_ended : " has not launched") +
                    "\n";
            continue;
        }
        for (const auto& cta : rank.running->grid->ctas) {
            for (const Warp& warp : cta->warps) {
                std::map<std::string, u32> waits;
                for (u32 lane = 0; lane < kWarpSize; ++lane) waits[describe(*warp.lanes[lane])] |= 1u << lane;
                for (const auto& [what, lanes] : waits)
                    text += "rank " + std::to_string(r) + " " + rank.running->request->name + " " + cta_name(*cta) +
                            " warp " + std::to_string(warp.index) + lane_list(lanes) + ": " + what + "\n";
            }
        }
    }
    return text;
}

}  // namespace deep_moe::emu
