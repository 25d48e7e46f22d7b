// A rank pulls `count` rows of 128 bytes from its neighbour into its pool with bulk copies (CTA 0), and reads the pool
// through TMA (CTA 1). Memory of a rank: source at 0, pool at 64 KiB, a ready counter u32 at 128 KiB.
#include "common.h"

enum Plant {
    kNone,
    kNoProxyFence,
    kNoBulkWait,
    kNoCommit,
    kReuseEarly,
    kRelaxedAdd,
    kRelaxedLoad,
    kNoLoadWait,
    kFenceByReader,
    kGenericCopyNoFence,
    kGenericCopy,
    kSmemNoFence,
    kSmemFence,
    kSmemSharedFence,
    kSharedFence,
    kSharedFenceByReader,
    kGenericCopySharedFence
};

DM_DEVICE void pull(const Args* a, u8* smem, u64* barriers) {
    const u8* source = a->peers[(a->rank + 1) % a->num_ranks];
    u8* pool = a->peers[a->rank] + 65536;
    u32* ready = reinterpret_cast<u32*>(a->peers[a->rank] + 131072);
    for (u32 row = 0; row < a->count; ++row) {
        u8* buffer = smem + row % 2 * 128;
        u64* barrier = &barriers[row % 2];
        hw::mbarrier_arrive_expect_tx(barrier, 128);
        hw::bulk_load(buffer, source + row * 128, 128, barrier);
        if (a->plant != kNoLoadWait) wait_barrier(barrier, row / 2 & 1);
        if (a->plant == kGenericCopy || a->plant == kGenericCopyNoFence || a->plant == kGenericCopySharedFence) {
            for (u32 i = 0; i < 8; ++i)
                hw::store(reinterpret_cast<Vec16*>(pool + row * 128) + i,
                          hw::load_shared(reinterpret_cast<Vec16*>(buffer) + i));
        } else {
            if (a->plant == kSmemNoFence || a->plant == kSmemFence || a->plant == kSmemSharedFence)
                hw::store_shared(buffer, hw::load_shared(buffer));
            if (a->plant == kSmemFence) hw::fence_proxy_async();
            if (a->plant == kSmemSharedFence) hw::fence_proxy_async_shared();
            hw::bulk_store(pool + row * 128, buffer, 128);
            if (a->plant != kNoCommit) hw::bulk_commit();
            if (a->plant == kReuseEarly)
                hw::bulk_wait<3>();
            else if (a->plant != kNoBulkWait)
                hw::bulk_wait<0>();
        }
        if (a->plant == kSharedFence || a->plant == kGenericCopySharedFence)
            hw::fence_proxy_async_shared();
        else if (a->plant != kNoProxyFence && a->plant != kFenceByReader && a->plant != kGenericCopyNoFence &&
                 a->plant != kSharedFenceByReader)
            hw::fence_proxy_async();
        if (a->plant == kRelaxedAdd)
            hw::atomic_add_relaxed_gpu(ready, 1);
        else
            hw::add_release_gpu(ready, 1);
    }
    hw::bulk_wait<0>();
}

DM_DEVICE void read(const Args* a, const Maps* maps, u8* smem, u64* barriers) {
    u32* ready = reinterpret_cast<u32*>(a->peers[a->rank] + 131072);
    if (hw::thread_idx() == 0) {
        if (a->plant == kRelaxedLoad)
            while (hw::load_relaxed<hw::Scope::Gpu>(ready) != a->count) hw::poll_pause(4, 0, ready);
        else
            while (hw::load_acquire<hw::Scope::Gpu>(ready) != a->count) hw::poll_pause(4, 0, ready);
        if (a->plant == kFenceByReader) hw::fence_proxy_async();
        if (a->plant == kSharedFenceByReader) hw::fence_proxy_async_shared();
        hw::mbarrier_arrive_expect_tx(&barriers[2], 8192);
        hw::tma_load_2d(smem + 1024, &maps->maps[0], 0, 0, &barriers[2]);
    }
    wait_barrier(&barriers[2], 0);
    for (u32 i = hw::thread_idx(); i < 8192 / 16; i += 32) {
        const u32 swizzled = i ^ (i >> 3 & 7);
        hw::store(reinterpret_cast<Vec16*>(a->out) + i,
                  hw::load_shared(reinterpret_cast<Vec16*>(smem + 1024) + swizzled));
    }
}

extern "C" void pull_rows(const Args* a, const Maps* maps) {
    u8* smem = hw::shared_memory();
    u64* barriers = reinterpret_cast<u64*>(smem + 512);
    if (hw::thread_idx() == 0) {
        for (u32 i = 0; i < 3; ++i) hw::mbarrier_init(&barriers[i], 1);
        hw::fence_mbarrier_init();
    }
    hw::sync_block();
    if (hw::block_idx() == 0) {
        if (hw::thread_idx() == 0) pull(a, smem, barriers);
    } else {
        read(a, maps, smem, barriers);
    }
}
