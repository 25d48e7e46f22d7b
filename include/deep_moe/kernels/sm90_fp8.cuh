// The fused expert-parallel MoE layer on Hopper, FP8 activations and FP8 or MXFP4 weights: which warps do what.
//
//   warp 0      LoadA     rows of a tile (TMA)
//   warp 1      LoadB     schedule, weights of a tile (bulk copies)
//   warps 2-3   Dispatch  routing counts, lists, pulling rows from all ranks; early weights, statistics
//   warps 4-    Math      two warpgroups, or four that decode MXFP4 weights: wgmma, SwiGLU + requantise, scatter, combine
//   warps 12-15 Decode    in kernels where MXFP4 weights are decoded to shared memory
//
// One launch: route -> (flags) -> pull -> L1 tiles -> L2 tiles -> scatter -> (flags) -> combine. See comm/ for what
// crosses ranks and what is left out with few tokens (lone_rank.h, direct_rows.h), sched/task_order.h for the order of
// tiles, layout/buffer.h for the memory.
#pragma once

#include "deep_moe/kernels/entry.h"
#include "deep_moe/roles/decode.h"
#include "deep_moe/roles/dispatch.h"
#include "deep_moe/roles/load.h"
#include "deep_moe/roles/math.h"

namespace deep_moe {

template <MegaMoeConfig kConfig>
DM_DEVICE void sm90_fp8_mega_moe(const MegaMoeParams& params, const MegaMoeTensorMaps& maps) {
    constexpr u32 kFirstDecodeWarp = 4 + kConfig.math_warps();
    const Context<kConfig> ctx(params, maps);
    const u32 warp = hw::warp_idx();
    if (hw::thread_idx() == 0) ctx.init_barriers();
    hw::wait_for_predecessors();
    if (hw::thread_idx() == 0) ctx.init_state();
    if (warp == 2) DispatchRole<kConfig>::prefetch(ctx);
    if constexpr (kConfig.has_direct_rows())
        if (warp == 3) DirectRows<kConfig>::read_tokens(ctx);
    hw::sync_block();

    if (warp < 4) {
        hw::lower_max_registers<kConfig.aux_registers()>();
        if (warp == 0) {
            if (hw::elect_one()) LoadARole<kConfig>::run(ctx);
        } else if (warp == 1) {
            if (hw::elect_one()) LoadBRole<kConfig>::run(ctx);
        } else {
            DispatchRole<kConfig>::run(ctx, warp - 2);
        }
    } else if (!kConfig.has_decode_warps() || warp < kFirstDecodeWarp) {
        hw::raise_max_registers<kConfig.math_registers()>();
        MathRole<kConfig>::run(ctx, warp - 4);
    } else if constexpr (kConfig.has_decode_warps()) {
        hw::lower_max_registers<kConfig.decode_registers()>();
        DecodeRole<kConfig>::run(ctx, warp - kFirstDecodeWarp);
    }
    ctx.trace.finish();
}

}  // namespace deep_moe

// The argument is a MegaMoeConfig expression in parentheses.
#define DM_DEFINE_MEGA_KERNEL(config)                                                                        \
    DM_ENTRY(mega_moe, (config).num_threads(),                                                               \
             (DM_ARGUMENT(deep_moe::MegaMoeParams, params), DM_ARGUMENT(deep_moe::MegaMoeTensorMaps, maps)), \
             (deep_moe::sm90_fp8_mega_moe<config>(DM_ARGUMENT_REF(params), DM_ARGUMENT_REF(maps))),          \
             deep_moe::buffer_layout_hash(config), deep_moe::smem_bytes(config), (config).num_threads(),     \
             deep_moe::u64(deep_moe::KernelKind::Mega))
