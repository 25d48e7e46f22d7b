"""Faults between ranks and CTAs: staging, routing, receiving, pulling, the end of a launch."""

from .mutant import Mutant

EXCHANGE = (
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
        "(next + expert, 1); });\n        hw::sync_warp();",
        "(next + expert, 1); });",
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
    Mutant("route: an entry of the next stripe", "comm/route.h", "entry < end ?", "entry <= end ?"),
    Mutant("route: one group of entries", "comm/route.h", "base += kGroup * kWarpSize", "base = end"),
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
        survives="the dispatch warp's proxy fence behind routing lies on the way already; see the ring slot's below",
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
        "n == kConfig.l2_n_tiles();",
        "n >= 1;",
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
        "dispatch: no proxy fence after routing where stages will be",
        "roles/dispatch.h",
        "hw::fence_proxy_async();  // where",
        "// where",
        survives="LoadA's proxy fence of the first tile lies on the way already; only LoadA loads where routing worked",
    ),
    Mutant(
        "dispatch: counts published before all lanes have written",
        "roles/dispatch.h",
        "            hw::sync_warp();\n",
        "",
    ),
)
