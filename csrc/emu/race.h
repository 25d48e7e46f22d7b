// Happens-before checks on shadow cells, and the two halves of synchronisation: release and acquire.
#pragma once

#include "scheduler.h"

namespace deep_moe::emu {

// Who performs an access, in which proxy, and how it will be ordered before later ones.
struct Actor {
    StampKind kind;
    Proxy proxy;
    u16 agent;
    u8 lane;
    u32 time;
    u32 lanes;  // for reads: all lanes the stamp speaks of
};

Actor generic_actor(const Fiber& f, const MemoryOp& op);
// An asynchronous copy that completes on the current phase of a barrier.
Actor barrier_actor(const Barrier& b, Proxy proxy);
// A bulk store of a group that the thread has not waited for.
Actor pending_actor(const Fiber& f, Proxy proxy);

void race_read(Fiber* f, const Shadow& shadow, const void* p, u64 bytes, const Actor& actor);
// True when a word was last written by a release, relaxed or atomic access.
bool race_write(Fiber* f, const Shadow& shadow, const void* p, u64 bytes, const Actor& actor);
// The last write of the word is ordered before f.
bool knows_last_write(const Fiber& f, const Shadow& shadow, const void* p);
// Checks a tensor-core read as `lane` knows the world, without recording it.
void race_tensor_read(Fiber* lane, const void* p, u32 bytes);
// Tensor-core reads of [offset, offset + bytes) of a CTA's shared memory must be over.
void race_tensor_write(Fiber* f, const Cta& cta, u32 offset, u64 bytes);

// A bulk store has been waited for: its pending stamps become ordinary ones of the thread.
void settle_bulk_store(Fiber* f, const BulkStore& store);

// What a release of f publishes, as a view; starts a new time of its warp.
ViewRef released_view(Fiber* f);
// The same, added to a view in place.
void release_into(Fiber* f, ViewRef& target);
void acquire_view(Fiber* f, const ViewRef& view);
void fence_async(Fiber* f);
void fence_async_shared(Fiber* f);
// All lanes of these warps that have not ended have met and know each other afterwards.
void meet(WorldImpl& world, Warp* first, u32 count);

// "rank 1 l2_pool+512", "shared smem_a+1024", "CTA 1 shared smem_a+1024" for that of another CTA
std::string place_name(const Fiber& f, const void* p);

}  // namespace deep_moe::emu
