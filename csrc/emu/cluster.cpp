// Clusters: their barrier, and the life of shared memory that others may touch.
#include "cluster.h"

#include "collectives.h"

namespace deep_moe::emu {

namespace {

// Everybody has arrived. The CTAs meet one by one, then what they know is joined.
void complete_sync(Fiber* f, Cluster& cluster) {
    WorldImpl& world = *f->world;
    cluster.meeting.count = 0;
    if (world.weak_memory) {
        ViewRef all, reads;
        for (Cta* cta : cluster.ctas) {
            if (cta->live == 0) continue;
            meet(world, cta->warps.data(), u32(cta->warps.size()));
            world.sizes.join_into(all, cta->fibers[0]->view);
            world.sizes.join_into(reads, cta->fibers[0]->reads);
        }
        for (Cta* cta : cluster.ctas)
            for (Fiber* other : cta->fibers) {
                other->view = all;
                other->reads = reads;
            }
    }
    for (Cta* cta : cluster.ctas) wake_others(f, {cta->warps.data(), u32(cta->warps.size())});
}

// The last thread of the CTA has ended. Whatever order the threads ran in: all that other CTAs did to its shared memory
// must be ordered before an end of one of its threads.
void check_end(Fiber* f) {
    const Cta& cta = *f->cta;
    const ViewSizes& sizes = f->world->sizes;
    ViewRef all;
    for (const Fiber* thread : cta.fibers) sizes.join_into(all, thread->view);
    for (const auto& b : cta.barriers)
        for (const Visit& v : b->visits) {
            if (all->phase(b->id) > v.phase) continue;
            if (!v.load && all->entry(Proxy::Generic, v.agent).knows(v.lane, v.time)) continue;
            fail(f, FaultKind::Race,
                 cta_name(cta) + " ends, and its shared memory with it, but " + (v.load ? "the load" : "the arrival") +
                     " on " + barrier_name(cta, *b) + " by " + f->world->agent_names[v.agent] + " lane " +
                     std::to_string(v.lane) + " is not ordered before that (sync_cluster)");
        }
}

}  // namespace

Cta& cluster_cta(Fiber* f, u32 rank, const char* what) {
    const Cluster& cluster = *f->cta->cluster;
    if (rank >= cluster.ctas.size())
        fail(f, FaultKind::Protocol,
             std::string(what) + " names CTA rank " + std::to_string(rank) + " of a cluster of " +
                 std::to_string(cluster.ctas.size()));
    Cta& cta = *cluster.ctas[rank];
    if (cta.live == 0)
        fail(f, FaultKind::Protocol,
             std::string(what) + " touches the shared memory of " + cta_name(cta) + ", which has ended");
    return cta;
}

std::string barrier_name(const Fiber& f, const Cta& cta, const Barrier& b) {
    const std::string name = barrier_name(cta, b);
    return &cta == f.cta ? name : name + " of CTA " + std::to_string(cta.index);
}

void remember_visit(Fiber* f, Barrier& b, bool load) {
    const Visit visit{u16(f->warp->agent), u8(f->lane), load, f->warp->time, b.view_phase()};
    for (Visit& v : b.visits)
        if (v.agent == visit.agent && v.lane == visit.lane && v.load == load) {
            v = visit;
            return;
        }
    b.visits.push_back(visit);
}

void leave_cluster(Fiber* f) {
    Cluster& cluster = *f->cta->cluster;
    Meeting& meeting = cluster.meeting;
    if (meeting.count != 0) {  // sync_cluster waits for the threads that have not ended
        meeting.size = cluster.live();
        if (meeting.count == meeting.size) complete_sync(f, cluster);
    }
    if (f->cta->live == 0 && cluster.ctas.size() > 1 && f->world->weak_memory) check_end(f);
}

void cluster_collective(Fiber* f) {
    Cluster& cluster = *f->cta->cluster;
    if (arrive(f, cluster.meeting, Collective::SyncCluster, 0, 0, cluster.live(), true))
        complete_sync(f, cluster);
    else
        f->world->block(f, Wait::Collective);
}

}  // namespace deep_moe::emu
