// Waiting. Two kinds, and no wait without an end:
//   * wait_barrier: on a barrier of this CTA. Every CTA keeps its own pipelines moving whatever happens elsewhere, so
//     it ends unless the kernel is wrong; then the thread leaves after twice the time-out.
//   * wait_word: on a word that other CTAs or ranks write. It gives up after the time-out, or when any rank has given
//     up, and tells all ranks. The roles then drain: they keep their control flow, stop waiting and stop writing
//     results, so that the grid ends in an orderly way and the CUDA context lives.
#pragma once

#include "deep_moe/kernels/context.h"

namespace deep_moe {

// Spinning this often between looks at the clock and the abort word keeps the poll short.
constexpr u32 kPollsPerCheck = 16;

template <MegaMoeConfig kConfig>
DM_DEVICE void raise_abort(const Context<kConfig>& ctx, AbortCode code, WaitSite site, u32 index) {
    const u64 record = abort_record(code, site, ctx.params.rank, index);
    DM_NO_UNROLL
    for (u32 i = 0; i < kConfig.num_ranks; ++i)
        hw::atomic_cas_relaxed_sys(&ctx.template peer<BufferField::Header>(i)->abort, 0, record);
}

// The abort record of this rank (0: none); a record is passed on to the host as soon as it is seen.
template <MegaMoeConfig kConfig>
DM_DEVICE u64 check_abort(const Context<kConfig>& ctx) {
    const u64 record = hw::load_relaxed<hw::Scope::Sys>(&ctx.template own<BufferField::Header>()->abort);
    if (record != 0 && ctx.params.host_status != nullptr) hw::store_relaxed_sys(ctx.params.host_status, record);
    return record;
}

// True once ready(word) holds for an acquired value; false when the launch is to be abandoned.
template <hw::Scope kScope, MegaMoeConfig kConfig, typename Word, typename Ready>
DM_DEVICE bool wait_word(const Context<kConfig>& ctx, WaitSite site, u32 index, const Word* word, Ready ready) {
    if (ready(hw::load_acquire<kScope>(word))) return true;
    const u64 start = hw::timer_ns();
    for (u32 polls = 1;; ++polls) {
        if (ready(hw::load_acquire<kScope>(word))) return true;
        if (polls % kPollsPerCheck == 0) {
            if (check_abort(ctx) != 0) return false;
            if (hw::timer_ns() - start > ctx.params.timeout_ns) raise_abort(ctx, AbortCode::Timeout, site, index);
        }
        hw::poll_pause(u32(site), index, word);
    }
}

template <MegaMoeConfig kConfig>
DM_DEVICE void wait_barrier(const Context<kConfig>& ctx, u32 index, u32 parity) {
    u64* barrier = ctx.barrier(index);
    [[maybe_unused]] const auto stall = ctx.trace.stall();
    if (hw::mbarrier_try_wait(barrier, parity)) return;
    const u64 start = hw::timer_ns();
    while (!hw::mbarrier_try_wait(barrier, parity)) {
        if (hw::timer_ns() - start > 2 * ctx.params.timeout_ns) {
            raise_abort(ctx, AbortCode::Timeout, WaitSite::Pipeline, index);
            hw::exit_thread();
        }
    }
}

}  // namespace deep_moe
