// Every rank sends a payload to every other rank and raises a flag. Peer memory: payload u32 [ranks][1024], flags u32
// [ranks] at 64 KiB. CTA 0 sends, CTA 1 receives; out u32 [ranks][1024].
#include "common.h"

enum Plant { kNone, kRelaxedStore, kRelaxedLoad, kNoSyncBeforeRelease, kNoSyncAfterAcquire, kGpuScopeLoad, kNoWait };

extern "C" void flags(const Args* a) {
    const u32 t = hw::thread_idx(), n = 1024;
    if (hw::block_idx() == 0) {
        for (u32 r = 0; r < a->num_ranks; ++r) {
            u32* payload = reinterpret_cast<u32*>(a->peers[r]) + a->rank * n;
            u32* flag = reinterpret_cast<u32*>(a->peers[r] + 65536) + a->rank;
            for (u32 i = t; i < n; i += 64) hw::store(payload + i, a->rank * 100000 + r * 10000 + i);
            if (a->plant != kNoSyncBeforeRelease) hw::sync_block();
            if (t == 0) {
                if (a->plant == kRelaxedStore)
                    hw::store_relaxed_sys(reinterpret_cast<u64*>(a->peers[r] + 98304) + a->rank, 1);
                else
                    hw::store_release_sys(flag, a->count);
            }
        }
    } else {
        for (u32 r = 0; r < a->num_ranks; ++r) {
            const u32* payload = reinterpret_cast<u32*>(a->peers[a->rank]) + r * n;
            const u32* flag = reinterpret_cast<u32*>(a->peers[a->rank] + 65536) + r;
            if (t == 0 && a->plant != kNoWait) {
                if (a->plant == kRelaxedStore) {
                    const u64* wide = reinterpret_cast<u64*>(a->peers[a->rank] + 98304) + r;
                    while (hw::load_acquire<hw::Scope::Sys>(wide) != 1) hw::poll_pause(2, r, wide);
                } else if (a->plant == kRelaxedLoad) {
                    while (hw::load_relaxed<hw::Scope::Sys>(flag) != a->count) hw::poll_pause(2, r, flag);
                } else if (a->plant == kGpuScopeLoad) {
                    while (hw::load_acquire<hw::Scope::Gpu>(flag) != a->count) hw::poll_pause(2, r, flag);
                } else {
                    while (hw::load_acquire<hw::Scope::Sys>(flag) != a->count) hw::poll_pause(2, r, flag);
                }
            }
            if (a->plant != kNoSyncAfterAcquire) hw::sync_block();
            for (u32 i = t; i < n; i += 64)
                hw::store(reinterpret_cast<u32*>(a->out) + r * n + i, hw::load(payload + i));
        }
    }
}
