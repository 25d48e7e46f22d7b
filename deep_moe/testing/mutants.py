"""One-line mutants of the device headers, for the mutation test: each plants a fault that the suite must notice.

`old` occurs exactly once in `file` (below include/deep_moe/), or `count` times, and is replaced by `new` everywhere.
`survives` says why nothing can notice it, where that is so.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    count: int = 1
    survives: str = ""


MUTANTS = (
    # Waiting and rings
    Mutant(
        "wait_word: acquire -> relaxed",
        "comm/wait.h",
        "hw::load_acquire<kScope>(word)",
        "hw::load_relaxed<kScope>(word)",
        2,
    ),
    Mutant(
        "wait_barrier: no wait",
        "comm/wait.h",
        "    u64* barrier = ctx.barrier(index);\n",
        "    return;\n    u64* barrier = ctx.barrier(index);\n",
    ),
    Mutant(
        "ring: consumer parity flipped",
        "pipe/ring.h",
        "full_parity() const { return phase; }",
        "full_parity() const { return phase ^ 1; }",
    ),
    Mutant(
        "ring: producer parity flipped",
        "pipe/ring.h",
        "empty_parity() const { return phase ^ 1; }",
        "empty_parity() const { return phase; }",
    ),
    Mutant("ring: phase never flips", "pipe/ring.h", "phase ^= 1;", ""),
    Mutant("ring: wraps one slot late", "pipe/ring.h", "if (++slot == kDepth)", "if (++slot == kDepth + 1)"),
    Mutant(
        "tasks: entry overwritten before it is released",
        "pipe/tasks.h",
        "        wait_barrier(ctx, ctx.barriers().task_empty(position.slot), position.empty_parity());\n",
        "",
    ),
    Mutant(
        "tasks: entry read before it is published",
        "pipe/tasks.h",
        "        wait_barrier(ctx, ctx.barriers().task_full(position.slot), position.full_parity());\n",
        "",
    ),
    Mutant(
        "tasks: entry published, but not announced",
        "pipe/tasks.h",
        "        hw::mbarrier_arrive(ctx.barrier(ctx.barriers().task_full(position.slot)));\n",
        "",
    ),
    Mutant("tasks: released before all lanes have read", "pipe/tasks.h", "        hw::sync_warp();\n", ""),
    Mutant(
        "barriers: full expects one arrival",
        "kernels/context.h",
        "hw::mbarrier_init(barrier(barriers().full(i)), 2);",
        "hw::mbarrier_init(barrier(barriers().full(i)), 1);",
    ),
    Mutant(
        "barriers: empty expects one warp less",
        "kernels/context.h",
        "hw::mbarrier_init(barrier(barriers().empty(i)), kNumMathWarps);",
        "hw::mbarrier_init(barrier(barriers().empty(i)), kNumMathWarps - 1);",
    ),
    Mutant("barriers: task_empty forgets LoadA", "kernels/context.h", "1 + kNumMathWarps", "kNumMathWarps"),
    Mutant("barriers: not fenced before use", "kernels/context.h", "        hw::fence_mbarrier_init();\n", ""),
    Mutant("epoch: of the last launch", "kernels/context.h", "->epoch) + 1", "->epoch)"),
    Mutant("state: not published to the block", "kernels/sm90_fp8.cuh", "    hw::sync_block();\n", ""),
    # Order
    Mutant(
        "order: L1 leads by one block more than the ring holds",
        "sched/task_order.h",
        "l1_.block - l2_.block < lag_blocks_",
        "l1_.block - l2_.block <= lag_blocks_",
    ),
    Mutant(
        "order: ring slot of the next block",
        "sched/task_order.h",
        "block % ring_blocks_}",
        "(block + 1) % ring_blocks_}",
    ),
    # Staging
    Mutant("stage: maxima over half of a group", "kernels/stage.cuh", "mask < 16; mask *= 2", "mask < 8; mask *= 2"),
    Mutant(
        "stage: routing factor dropped", "kernels/stage.cuh", "hw::mul(weight, params.routed_scaling_factor)", "weight"
    ),
    # Routing
    Mutant(
        "route: counts not zeroed before counting",
        "comm/route.h",
        "hw::store_shared(next + e, 0u);\n        hw::sync_warp();",
        "hw::store_shared(next + e, 0u);",
    ),
    Mutant(
        "route: places not reserved after counting",
        "comm/route.h",
        "(next + expert, 1);\n        }\n        hw::sync_warp();",
        "(next + expert, 1);\n        }",
    ),
    Mutant(
        "route: does not wait for the other CTAs' counts",
        "comm/route.h",
        "if (!meet(ctx, &header->count_arrivals, parts)) return false;",
        "meet(ctx, &header->count_arrivals, 1);",
    ),
    Mutant(
        "route: count arrival relaxed",
        "comm/route.h",
        "hw::atomic_add_acq_rel<hw::Scope::Gpu>(arrivals, 1)",
        "hw::atomic_add_relaxed_gpu(arrivals, 1)",
    ),
    Mutant(
        "route: list arrival relaxed",
        "comm/route.h",
        "hw::atomic_add_acq_rel<hw::Scope::Sys>(&header->list_arrivals, 1)",
        "hw::atomic_add_relaxed_gpu(&header->list_arrivals, 1)",
    ),
    Mutant(
        "route: lists announced before the warp has written them",
        "comm/route.h",
        "        write_lists(ctx, begin, end);\n        hw::sync_warp();\n",
        "        write_lists(ctx, begin, end);\n",
    ),
    Mutant("route: flag relaxed", "comm/route.h", "hw::store_release_sys(", "hw::store_relaxed_sys("),
    Mutant(
        "route: flag before the counts of the warp",
        "comm/route.h",
        "        hw::sync_warp();\n        const u64 flag",
        "        const u64 flag",
    ),
    Mutant("route: send_counts not cleared", "comm/route.h", "            hw::store(send_counts + e, 0u);\n", ""),
    Mutant(
        "route: count_arrivals not cleared", "comm/route.h", "            hw::store(&header->count_arrivals, 0u);\n", ""
    ),
    Mutant(
        "route: list_arrivals not cleared", "comm/route.h", "            hw::store(&header->list_arrivals, 0u);\n", ""
    ),
    Mutant("route: any CTA announces", "comm/route.h", "== parts - 1) announce", "== 0) announce"),
    # Receiving and pulling
    Mutant(
        "receive: does not wait for the flags", "comm/receive.h", "return u32(word >> 32) == epoch;", "return true;"
    ),
    Mutant(
        "receive: flag of an earlier launch is enough",
        "comm/receive.h",
        "return u32(word >> 32) == epoch;",
        "return u32(word >> 32) + 1 >= epoch;",
    ),
    Mutant(
        "receive: flag acquired with gpu scope",
        "comm/receive.h",
        "wait_word<hw::Scope::Sys>",
        "wait_word<hw::Scope::Gpu>",
    ),
    Mutant(
        "receive: statistics overwritten",
        "comm/receive.h",
        "hw::load(ctx.params.recv_stats + e) + i32(rows)",
        "i32(rows)",
    ),
    Mutant(
        "pull: no proxy fence before reading staged rows",
        "comm/pull.h",
        "hw::fence_proxy_async();  // peers staged",
        "// peers staged",
    ),
    Mutant(
        "pull: too few bytes expected",
        "comm/pull.h",
        "hw::mbarrier_arrive_expect_tx(barrier, kConfig.hidden);",
        "hw::mbarrier_arrive_expect_tx(barrier, kConfig.hidden - 16);",
    ),
    Mutant(
        "pull: row stored before it has arrived",
        "comm/pull.h",
        "            wait_barrier(ctx, row_barrier(ctx, warp, request), request / kRowBuffers % 2);\n",
        "",
    ),
    Mutant(
        "pull: ring slot not awaited", "comm/pull.h", "        if (!wait_ring_slot(ctx, row.block)) return false;\n", ""
    ),
    Mutant(
        "pull: ring slot taken after the first L2 tile",
        "comm/pull.h",
        "n == kConfig.l2_n_tiles() * kNumMathWarps",
        "n >= kNumMathWarps",
    ),
    Mutant(
        "pull: no proxy fence before a ring slot is used again",
        "comm/pull.h",
        "hw::fence_proxy_async();  // the slot's",
        "// the slot's",
        survives="LoadA's proxy fence lies between the slot's last round and this one already; the emulator, like the "
        "PTX memory model, asks for one anywhere on that path",
    ),
    Mutant(
        "pull: published before the bulk store has ended",
        "comm/pull.h",
        "        if (hw::lane_idx() == 0) hw::bulk_wait<0>();\n",
        "",
    ),
    Mutant("pull: bulk store never committed", "comm/pull.h", "            hw::bulk_commit();\n", ""),
    Mutant(
        "pull: published before all lanes have stored scales",
        "comm/pull.h",
        "hw::bulk_wait<0>();\n        hw::sync_warp();",
        "hw::bulk_wait<0>();",
    ),
    Mutant("pull: publication relaxed", "comm/pull.h", "hw::add_release_gpu(", "hw::atomic_add_relaxed_gpu("),
    Mutant(
        "pull: one buffer for two rows",
        "comm/pull.h",
        "(warp * kRowBuffers + request % kRowBuffers)",
        "(warp * kRowBuffers)",
    ),
    Mutant(
        "dispatch: counters of the next launch not cleared",
        "roles/dispatch.h",
        "            clear_other_bank(ctx);\n",
        "",
    ),
    Mutant(
        "dispatch: clears its own counters", "roles/dispatch.h", "u64((ctx.epoch() + 1) & 1)", "u64(ctx.epoch() & 1)"
    ),
    Mutant(
        "dispatch: pulls before the counts are there",
        "roles/dispatch.h",
        "        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);\n",
        "",
    ),
    Mutant(
        "dispatch: counts published before all lanes have written",
        "roles/dispatch.h",
        "            hw::sync_warp();\n",
        "",
    ),
    # Loading
    Mutant(
        "loadB: schedule before the counts are there",
        "roles/load.h",
        "        wait_barrier(ctx, ctx.barriers().counts_ready(), 0);\n",
        "",
    ),
    Mutant(
        "load: stages overwritten before they are released",
        "roles/load.h",
        "            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());\n",
        "",
        2,
    ),
    Mutant("loadB: scale record not expected", "roles/load.h", "kTileBytes + kRecordBytes", "kTileBytes"),
    Mutant("loadA: scales not expected", "roles/load.h", "kTileBytes + kScaleBytes", "kTileBytes"),
    Mutant(
        "loadA: more bytes expected than come",
        "roles/load.h",
        "kTileBytes + kScaleBytes",
        "kTileBytes + kScaleBytes + 16",
    ),
    Mutant("loadA: no proxy fence after the wait", "roles/load.h", "            hw::fence_proxy_async();\n", ""),
    Mutant("loadA: L1 starts at the first row", "roles/load.h", "return n == rows;", "return n >= 1;"),
    Mutant(
        "loadA: L2 starts before all warps have stored",
        "roles/load.h",
        "n == kConfig.l1_n_tiles() * kNumMathWarps",
        "n >= kConfig.l1_n_tiles() * kNumMathWarps - 1",
    ),
    # Math
    Mutant("mma: not committed", "mma/promote.h", "    hw::wgmma_commit();\n", ""),
    Mutant("mma: registers not fenced", "mma/promote.h", "    hw::wgmma_fence();\n", ""),
    Mutant("mma: first instruction accumulates", "mma/promote.h", "k != 0", "true"),
    Mutant("mma: descriptor not advanced along K", "mma/promote.h", "advance_descriptor(desc_b, k)", "desc_b"),
    Mutant("mma: half of the scale group", "mma/promote.h", "k < kBlockK", "k < kBlockK / 2"),
    Mutant("mma: scales of the other row", "mma/promote.h", "row = i / 2 % 2", "row = i % 2"),
    Mutant("mma: partial replaces the sum", "mma/promote.h", ", sum[i]);", ", 0.0f);"),
    Mutant(
        "descriptor: stride of 8-row groups", "mma/descriptor.h", "kSwizzleAtomBytes >> 4", "kSwizzleAtomBytes >> 5"
    ),
    Mutant("descriptor: 64-byte swizzle", "mma/descriptor.h", "kSwizzle128 = 1", "kSwizzle128 = 2"),
    Mutant("math: partial read while it is computed", "roles/math.h", "hw::wgmma_wait<0>();", "hw::wgmma_wait<1>();"),
    Mutant(
        "math: stage released before the last piece",
        "roles/math.h",
        "if (p + 1 == kPieces) release",
        "if (p == 0) release",
    ),
    Mutant(
        "math: stage released before all lanes have read scales",
        "roles/math.h",
        "        hw::sync_warp();\n        if (hw::lane_idx() == 0) hw::mbarrier_arrive(",
        "        if (hw::lane_idx() == 0) hw::mbarrier_arrive(",
    ),
    Mutant(
        "math: tile does not wait for its stage",
        "roles/math.h",
        "            wait_barrier(ctx, ctx.barriers().full(stage.slot), stage.full_parity());\n",
        "",
    ),
    Mutant(
        "math: tile done before all lanes have stored",
        "roles/math.h",
        "            hw::sync_warp();\n            if (hw::lane_idx() == 0) hw::add_release_gpu",
        "            if (hw::lane_idx() == 0) hw::add_release_gpu",
    ),
    Mutant("math: tile done relaxed", "roles/math.h", "hw::add_release_gpu(", "hw::atomic_add_relaxed_gpu("),
    Mutant(
        "finish: arrivals relaxed",
        "roles/math.h",
        "hw::atomic_add_acq_rel<hw::Scope::Sys>(",
        "hw::atomic_add_relaxed_gpu(",
    ),
    Mutant("finish: done flag is a plain store", "roles/math.h", "hw::store_release_sys(", "hw::store("),
    Mutant(
        "finish: done flag acquired with gpu scope",
        "roles/math.h",
        "wait_word<hw::Scope::Sys>",
        "wait_word<hw::Scope::Gpu>",
    ),
    Mutant(
        "finish: done flag of the last launch is enough",
        "roles/math.h",
        "i32(seen - epoch) >= 0",
        "i32(seen - epoch) >= -1",
    ),
    Mutant(
        "finish: counters not cleared",
        "roles/math.h",
        "        if (last && hw::lane_idx() == 0) hw::store(arrivals, 0u);\n",
        "",
    ),
    Mutant(
        "finish: epoch not advanced",
        "roles/math.h",
        "            hw::store(&header->epoch, epoch);",
        "            hw::store(&header->epoch, epoch - 1);",
    ),
    Mutant("finish: first warp reports for all", "roles/math.h", "== expected - 1", "== 0"),
    Mutant("finish: last warp but one reports for all", "roles/math.h", "== expected - 1", "== expected - 2"),
    # Epilogues
    Mutant(
        "swiglu: maxima exchanged through one bank",
        "epi/swiglu_quantise.h",
        "exchanges % 2 * (kNumMathWarpgroups * 64)",
        "0",
    ),
    Mutant(
        "swiglu: maxima not awaited",
        "epi/swiglu_quantise.h",
        "        wait_barrier(ctx, ctx.barriers().amax(), exchanges % 2);\n",
        "",
    ),
    Mutant(
        "swiglu: maxima announced before all lanes have stored",
        "epi/swiglu_quantise.h",
        "        hw::sync_warp();\n        if (hw::lane_idx() == 0) hw::mbarrier_arrive(",
        "        if (hw::lane_idx() == 0) hw::mbarrier_arrive(",
    ),
    Mutant(
        "swiglu: maxima over half a quad",
        "epi/swiglu_quantise.h",
        "mask <= 2; mask *= 2) amax[r]",
        "mask <= 1; mask *= 2) amax[r]",
    ),
    Mutant(
        "swiglu: weight dropped",
        "epi/swiglu_quantise.h",
        "acc.sum[p][gate + 4], clamp), weight[row])",
        "acc.sum[p][gate + 4], clamp), 1.0f)",
    ),
    Mutant(
        "swiglu: gate clamped on both sides",
        "epi/swiglu_quantise.h",
        "    up = up > clamp ? clamp : up;\n",
        "    up = up > clamp ? clamp : up;\n    gate = gate < -clamp ? -clamp : gate;\n",
    ),
    Mutant(
        "scatter: to the wrong slot",
        "epi/scatter.h",
        "target.slot_row * u64(kConfig.hidden)",
        "(target.slot_row ^ 1) * u64(kConfig.hidden)",
    ),
    Mutant("quad: second exchange skipped", "epi/quad.h", "bit <= 2", "bit <= 1"),
    Mutant(
        "combine: masked slots are added",
        "comm/combine.h",
        "            if (slots >> k & 1)\n                DM_UNROLL",
        "            if (true)\n                DM_UNROLL",
    ),
    Mutant(
        "combine: half of the columns",
        "comm/combine.h",
        "if (column >= kConfig.hidden) return;",
        "if (column >= kConfig.hidden / 2) return;",
    ),
)
