// The functions behind the table that kernels call (deep_moe/hw/emu/api.h), by the file that defines them.
#pragma once

#include "deep_moe/hw/emu/api.h"

namespace deep_moe::emu {

// memory.cpp
void api_load(ThreadHead*, const void* p, void* value, u32 bytes, MemoryOp op);
void api_store(ThreadHead*, void* p, const void* value, u32 bytes, MemoryOp op);
u64 api_read_modify_write(ThreadHead*, void* p, u32 bytes, Rmw rmw, u64 expected, u64 operand, MemoryOp op);
void api_fence_proxy_async(ThreadHead*);
void api_fence_proxy_async_shared(ThreadHead*);

// collectives.cpp
u64 api_collective(ThreadHead*, Collective op, u64 value, u32 argument);
u64 api_timer_ns(ThreadHead*);
void api_poll_pause(ThreadHead*, u32 site, u32 index, const void* address);
void api_exit_thread(ThreadHead*);

// barriers.cpp
u32 api_shared_address(ThreadHead*, const void* p);
void api_mbarrier_init(ThreadHead*, u64* barrier, u32 arrivals);
void api_fence_mbarrier_init(ThreadHead*);
void api_mbarrier_arrive(ThreadHead*, u64* barrier, u32 expect_tx_bytes);
void api_mbarrier_arrive_cluster(ThreadHead*, u64* barrier, u32 cta_rank);
bool api_mbarrier_test_wait(ThreadHead*, u64* barrier, u32 parity);
bool api_mbarrier_try_wait(ThreadHead*, u64* barrier, u32 parity);

// copies.cpp
void api_bulk_load(ThreadHead*, void* shared, const void* global, u32 bytes, u64* barrier, u32 cta_mask);
void api_bulk_store(ThreadHead*, void* global, const void* shared, u32 bytes);
void api_prefetch(ThreadHead*, const void* global);
void api_bulk_commit(ThreadHead*);
void api_bulk_wait(ThreadHead*, u32 pending);
void api_tma_load(ThreadHead*, void* shared, const TensorMap* map, u32 rank, const u32* coordinates, u64* barrier,
                  u32 cta_mask);

// wgmma.cpp
void api_wgmma(ThreadHead*, const WgmmaOperands& operands);

}  // namespace deep_moe::emu
