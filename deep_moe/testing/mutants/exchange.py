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
        "if (!meet(ctx, parts)) return false;",
        "meet(ctx, 1);",
    ),
    Mutant(
        "route: count arrival relaxed",
        "comm/route.h",
        "hw::atomic_add_acq_rel<hw::Scope::Gpu>(arrivals, 1)",
        "hw::atomic_add_relaxed_gpu(arrivals, 1)",
    ),
    Mutant(
        "route: a CTA that routes alone begins behind its own rows",
        "comm/route.h",
        "const u32 within = parts == 1 ? 0 : ",
        "const u32 within = ",
    ),
    Mutant(
        "route: a CTA among others takes its own counts for all",
        "comm/route.h",
        "rows = parts == 1 ?",
        "rows = parts >= 1 ?",
    ),
    Mutant(
        "route: counts passed on by the second CTA",
        "comm/route.h",
        "e < kExperts && hw::block_idx() == 0",
        "e < kExperts && hw::block_idx() == 1",
    ),
    Mutant("route few: counts not zeroed", "comm/route.h", "hw::store_shared(counts + e, 0u);", ";"),
    Mutant(
        "route few: entries of no token",
        "comm/route.h",
        "entry < entries ? expert_of(ctx, entry) : kExperts",
        "expert_of(ctx, entry)",
    ),
    Mutant(
        "route few: one place for all rows of an expert", "comm/route.h", "place + hw::popcount(here & below)", "place"
    ),
    Mutant(
        "route few: places go on in the next owner's list",
        "comm/route.h",
        "if (expert / kLocal != owner) place = 0;",
        "",
    ),
    Mutant(
        "route few: counts passed on before they are counted",
        "comm/route.h",
        "            place += hw::popcount(here);\n        }\n        hw::sync_warp();",
        "            place += hw::popcount(here);\n        }",
    ),
    Mutant("route: an entry of the next stripe", "comm/route.h", "entry < end ?", "entry <= end ?"),
    Mutant("route: one group of entries", "comm/route.h", "base += kGroup * kWarpSize", "base = end"),
    # Arriving
    Mutant(
        "arrivals: before the warp has written",
        "comm/arrivals.h",
        "        hw::sync_warp();\n        u64* word",
        "        u64* word",
    ),
    Mutant(
        "arrivals: relaxed",
        "comm/arrivals.h",
        "hw::add_release<scope<kConfig>()>(word, part);",
        "for (u64 seen = 0, old; (old = hw::atomic_cas_relaxed_sys(word, seen, seen + part)) != seen;) seen = old;",
    ),
    Mutant("arrivals: one CTA too early", "comm/arrivals.h", "(count - 1)", "(count - 2)"),
    Mutant(
        "arrivals: told before this rank's CTAs have arrived",
        "comm/arrivals.h",
        "hw::lane_idx() != 0 || wait_rank(ctx, site, self, 0);",
        "true;",
    ),
    Mutant("arrivals: told relaxed", "comm/arrivals.h", "hw::store_release_sys(", "hw::store_relaxed_sys("),
    Mutant("arrivals: not told", "comm/arrivals.h", "if (ok && tells) {", "if (ok && tells && self == 0) {"),
    Mutant("arrivals: other ranks not awaited", "comm/arrivals.h", "(rank == self ||", "(rank != kConfig.num_ranks ||"),
    Mutant("arrivals: not awaited", "comm/arrivals.h", "return u32(seen >> 32) == epoch;", "return true;"),
    Mutant(
        "arrivals: those of an earlier launch are enough",
        "comm/arrivals.h",
        "return u32(seen >> 32) == epoch;",
        "return u32(seen >> 32) + 1 >= epoch;",
    ),
    Mutant(
        "arrivals: acquired with gpu scope",
        "comm/arrivals.h",
        "wait_word<scope<kConfig>()>",
        "wait_word<hw::Scope::Gpu>",
    ),
    Mutant(
        "arrivals: awaited by one lane only",
        "comm/arrivals.h",
        "        hw::sync_warp();\n        ok = hw::all_lanes(ok);\n        if constexpr",
        "        if constexpr",
    ),
    # Receiving and pulling
    Mutant(
        "receive: statistics overwritten",
        "comm/receive.h",
        "hw::store(stat, hw::load(stat) + ",
        "hw::store(stat, ",
    ),
    Mutant(
        "receive: the list of experts begins one too late",
        "comm/receive.h",
        "below = (1u << hw::lane_idx()) - 1",
        "below = (2u << hw::lane_idx()) - 1",
    ),
    Mutant(
        "receive: the first 32 experts' places in the list again",
        "comm/receive.h",
        "            touched += hw::popcount(with_rows);\n",
        "            touched = hw::popcount(with_rows);\n",
    ),
    Mutant(
        "receive: row blocks of one lane",
        "comm/receive.h",
        "blocks += hw::shfl_xor(blocks, mask);",
        "hw::shfl_xor(blocks, mask);",
    ),
    Mutant(
        "receive: half of the used blocks are told to the next launch",
        "comm/receive.h",
        "(ctx.epoch() & 1), blocks)",
        "(ctx.epoch() & 1), blocks / 2)",
    ),
    Mutant(
        "receive: used blocks of the other bank",
        "comm/receive.h",
        "blocks_used + (ctx.epoch() & 1)",
        "blocks_used + (ctx.epoch() + 1 & 1)",
    ),
    # One rank alone
    Mutant(
        "lone rank: counts before they are zeroed",
        "comm/lone_rank.h",
        "hw::store_shared(rows + e, 0u);\n        hw::sync_warp();",
        "hw::store_shared(rows + e, 0u);",
    ),
    Mutant(
        "lone rank: lists before all lanes have counted",
        "comm/lone_rank.h",
        "        hw::sync_warp();\n        ctx.trace",
        "        ctx.trace",
    ),
    Mutant(
        "lone rank: holes counted",
        "comm/lone_rank.h",
        "if (expert < kExperts) hw::",
        "hw::",
        survives="behind the counts of the case's experts lies the list of experts, which is written afterwards",
    ),
    Mutant(
        "lone rank: always the first entry of 32",
        "comm/lone_rank.h",
        "            for (; row > 0; --row) found &= found - 1;\n",
        "",
    ),
    Mutant("lone rank: entries of the first 32 again", "comm/lone_rank.h", "return base + hw::", "return hw::"),
    Mutant(
        "lone rank: more entries than there is room for",
        "comm/lone_rank.h",
        "ctx.num_entries() <= kMaxLoneEntries",
        "ctx.num_entries() <= 2 * kMaxLoneEntries",
    ),
    Mutant(
        "lone rank: no count arrival",
        "comm/lone_rank.h",
        "if (hw::block_idx() == 0) Arrivals",
        "if (false) Arrivals",
    ),
    Mutant(
        "lone rank: every CTA arrives",
        "comm/lone_rank.h",
        "if (hw::block_idx() == 0) Arrivals",
        "Arrivals",
    ),
    # Rows that are not pulled
    Mutant(
        "direct rows: more tokens than there are scales",
        "comm/direct_rows.h",
        "ctx.num_tokens() <= kMaxDirectTokens",
        "ctx.num_tokens() <= 2 * kMaxDirectTokens",
    ),
    Mutant(
        "direct rows: more entries than lanes",
        "comm/direct_rows.h",
        "ctx.num_entries() <= kMaxDirectRows;",
        "ctx.num_entries() <= 2 * kMaxDirectRows;",
    ),
    Mutant(
        "direct rows: all rows of an expert in its first place",
        "comm/direct_rows.h",
        "row = hw::popcount(entries_here & below);",
        "row = 0;",
    ),
    Mutant(
        "direct rows: one block for every expert",
        "comm/direct_rows.h",
        "block += ceil_div(rows, kConfig.block_m);",
        "block += 1;",
    ),
    Mutant(
        "direct rows: the next entry's weight",
        "comm/direct_rows.h",
        "hw::load_shared(weights(ctx) + entry));\n    }\n    // [K",
        "hw::load_shared(weights(ctx) + entry + 1));\n    }\n    // [K",
    ),
    Mutant(
        "direct rows: scales of the block's first row",
        "comm/direct_rows.h",
        "min_of(row, task.rows - 1u)",
        "0u",
    ),
    Mutant(
        "direct rows: pulled all the same",
        "roles/dispatch.h",
        " && !DirectRows<kConfig>::applies(ctx);",
        ";",
    ),
    Mutant(
        "direct rows: the block's first row for all",
        "roles/load.h",
        "token_of(ctx, task.block, row), full)",
        "token_of(ctx, task.block, 0), full)",
    ),
    Mutant(
        "direct rows: one on top of the other",
        "roles/load.h",
        "hw::tma_load_2d(tile + row * kBlockK, ctx.map(MapIndex::StagedRow)",
        "hw::tma_load_2d(tile, ctx.map(MapIndex::StagedRow)",
    ),
    Mutant(
        "direct rows: scales of the first K block",
        "mma/swapped_fp8.h",
        "            if (direct) ++operands.row_scales[0], ++operands.row_scales[1];\n",
        "",
    ),
    Mutant(
        "early weights: behind the matrix",
        "comm/early_weights.h",
        "hw::bulk_prefetch(from + at, ",
        "hw::bulk_prefetch(from + at + kBudget, ",
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
        "            wait_barrier(ctx, row_barrier(ctx, warp, number), number / kBuffers % 2);\n",
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
        "        if (hw::elect_one()) hw::bulk_wait<0>();\n",
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
        "(warp * kBuffers + number % kBuffers)",
        "(warp * kBuffers)",
    ),
    Mutant(
        "dispatch: counters of the next launch not cleared",
        "roles/dispatch.h",
        "            clear_other_bank(ctx);\n",
        "",
    ),
    Mutant(
        "dispatch: clears its own counters",
        "roles/dispatch.h",
        "bank = (ctx.epoch() + 1) & 1",
        "bank = ctx.epoch() & 1",
    ),
    Mutant(
        "dispatch: counts of the next launch not cleared",
        "roles/dispatch.h",
        "e < kConfig.num_experts; e += stride)",
        "e < kConfig.num_experts - 1; e += stride)",
    ),
    Mutant(
        "dispatch: arrivals of the next launch not cleared",
        "roles/dispatch.h",
        "            hw::store(header->count_arrivals + bank, 0u);\n",
        "",
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
    ),
    Mutant(
        "dispatch: counts published before all lanes have written",
        "roles/dispatch.h",
        "            hw::sync_warp();\n",
        "",
    ),
)
