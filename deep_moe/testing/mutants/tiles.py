"""Faults in what a tile computes: wgmma, promotion, epilogues, combine."""

from .mutant import Mutant

TILES = (
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
        "                hw::wgmma_wait<0>();\n                if (p + 1 == kPieces) {\n"
        "                    release(ctx, stage);\n",
        "                if (p == 0) release(ctx, stage);\n                hw::wgmma_wait<0>();\n"
        "                if (p + 1 == kPieces) {\n",
    ),
    Mutant(
        "math: stage released before all lanes have read scales",
        "pipe/stages.h",
        "    hw::sync_warp();\n",
        "",
    ),
    Mutant(
        "math: tile does not wait for its stage",
        "roles/math.h",
        "            if (!next_full) wait_full(ctx, stage);\n",
        "",
    ),
    Mutant(
        "math: row meta data loaded before the rows are there",
        "roles/math.h",
        "        wait_full(ctx, stage);\n        ctx.trace",
        "        ctx.trace",
    ),
    Mutant(
        "math: row meta data of the first row for both",
        "epi/accumulator.h",
        "hw::lane_idx() / 4 + 8 * r",
        "hw::lane_idx() / 4",
    ),
    Mutant(
        "math: one row too many is valid",
        "epi/accumulator.h",
        "return row(r) < task.rows",
        "return row(r) <= task.rows",
    ),
    # How the warpgroups share a tile
    Mutant(
        "split: short for any number of rows",
        "layout/config.h",
        "rows <= kWarpgroupRows ? kWarpgroupRows : block_m",
        "kWarpgroupRows",
    ),
    Mutant(
        "split: short for 72 rows",
        "layout/config.h",
        "rows <= kWarpgroupRows ? kWarpgroupRows",
        "rows <= kWarpgroupRows + 8 ? kWarpgroupRows",
    ),
    Mutant(
        "split: rows of a full block expected for a short one",
        "roles/load.h",
        "parts * rows * kBlockK + scale_bytes",
        "parts * kBlockBytes + scale_bytes",
    ),
    Mutant(
        "split: both warpgroups take the first columns",
        "epi/accumulator.h",
        "kByColumns ? warpgroup * kPieces * kPieceN : 0",
        "0",
    ),
    Mutant(
        "split: columns of the other rows",
        "epi/accumulator.h",
        "kByColumns ? 0 : warpgroup * kWarpgroupRows",
        "warpgroup * kWarpgroupRows",
    ),
    Mutant(
        "split: maxima of a half tile",
        "epi/swiglu_quantise.h",
        "        if constexpr (ThreadTile<kSplit>::kByColumns) exchange(ctx, tile, amax, barrier);\n",
        "",
    ),
    Mutant(
        "split: own maxima instead of the others'",
        "epi/swiglu_quantise.h",
        "(tile.warpgroup ^ 1) * 64",
        "tile.warpgroup * 64",
    ),
    Mutant(
        "split: scales of the upper rows not stored",
        "epi/swiglu_quantise.h",
        "!ThreadTile<kSplit>::kByColumns || tile.warpgroup == 0;",
        "tile.warpgroup == 0;",
    ),
    Mutant(
        "finish: before all warps have stored",
        "roles/math.h",
        "        barrier.meet(ctx);\n        const bool first_cta",
        "        const bool first_cta",
    ),
    Mutant("finish: epoch not advanced", "roles/math.h", "->epoch, ctx.epoch());", "->epoch, ctx.epoch() - 1);"),
    Mutant(
        "finish: every CTA advances the epoch",
        "roles/math.h",
        "if (first_cta && math_warp == 0 && hw::lane_idx() == 0)",
        "if (math_warp == 0 && hw::lane_idx() == 0)",
    ),
    # Swapped operands
    Mutant("swapped: one group of weight rows for both", "mma/swapped_fp8.h", "p * kNextWeights + k", "k"),
    Mutant("swapped: rows of a stage's first K block", "mma/swapped_fp8.h", "(kIsL1 ? 0 : p * kRowBytes) + k", "k"),
    Mutant(
        "swapped: K blocks beyond the last",
        "mma/swapped_fp8.h",
        "multiply_stage<kKind, kRest>(",
        "multiply_stage<kKind, kPieces>(",
    ),
    Mutant("swapped: the last K blocks left out", "mma/swapped_fp8.h", "constexpr (kRest != 0)", "constexpr (false)"),
    Mutant("swapped: scale of the other 128 weight rows", "mma/swapped_fp8.h", "% 2;  // of", "% 2 ^ 1;  // of"),
    Mutant("swapped: scale of the gate for up", "mma/swapped_fp8.h", "(kIsL1 ? i : half)", "(kIsL1 ? 0 : half)"),
    Mutant(
        "swapped: scales of the last stage", "mma/swapped_fp8.h", "weight_scales += kBlocks * ", "weight_scales += "
    ),
    Mutant(
        "swapped: no activation scale",
        "epi/swapped.h",
        "hw::mul(x_sf[i / 4][i % 2], w_sf[i / 2 % 2])",
        "w_sf[i / 2 % 2]",
    ),
    Mutant(
        "swapped: scales of the other row", "epi/swapped.h", "x_sf[i / 4][i % 2], w_sf", "x_sf[i / 4][i / 2 % 2], w_sf"
    ),
    Mutant("swapped: first instruction accumulates", "mma/swapped_fp8.h", "k != 0);", "true);"),
    Mutant(
        "swapped: stage released while it is read",
        "mma/swapped_fp8.h",
        "        hw::wgmma_wait<0>();\n        release(ctx, stage);\n",
        "        release(ctx, stage);\n        hw::wgmma_wait<0>();\n",
    ),
    Mutant(
        "swapped: tile does not wait for its stage",
        "mma/swapped_fp8.h",
        "        if (!is_last && !next_full) wait_full(ctx, stage);\n",
        "",
    ),
    Mutant(
        "swapped: both warpgroups take the same L2 tiles",
        "roles/swapped_math.h",
        "l2_tiles++ % kConfig.math_warpgroups() == math_warp / 4",
        "l2_tiles++ % kConfig.math_warpgroups() == 0",
    ),
    Mutant(
        "swapped: the other warpgroup's tile skipped without waiting",
        "roles/swapped_math.h",
        "            wait_full(ctx, stage);  // or",
        "            // or",
    ),
    Mutant(
        "swapped: the other warpgroup's stages not released",
        "roles/swapped_math.h",
        "            release(ctx, stage);\n        }",
        "        }",
    ),
    Mutant(
        "swapped: maxima not exchanged",
        "epi/swapped.h",
        "hw::load_shared(first + warp * kConfig.block_m + row)",
        "hw::load_shared(bank + thread.math_warp * kConfig.block_m + row)",
    ),
    Mutant(
        "swapped: maxima exchanged through one bank",
        "epi/swapped.h",
        "barrier.meetings % 2 * (kWarps * kConfig.block_m)",
        "0",
    ),
    Mutant(
        "swapped: maxima of half the warps",
        "epi/swapped.h",
        "warp < kWarps; warp += kWarpsAtOnce",
        "warp < kWarps / 2; warp += kWarpsAtOnce",
        cases="MXFP4",
    ),
    Mutant("swapped: maxima of half the lanes", "epi/swapped.h", "mask < kWarpSize;", "mask < kWarpSize / 2;"),
    Mutant(
        "swapped: own rows exchanged",
        "epi/swapped.h",
        "takes_second_row() ? of_row[0] : of_row[1], kPartner",
        "takes_second_row() ? of_row[1] : of_row[0], kPartner",
    ),
    Mutant(
        "swapped: channels of a pair swapped",
        "epi/swapped.h",
        "ChannelPair{got, of_row[1]} : ChannelPair{of_row[0], got}",
        "ChannelPair{of_row[1], got} : ChannelPair{got, of_row[0]}",
    ),
    Mutant("swapped: codes of one piece for both", "epi/swapped.h", ">> 8 * p & 0xff", "& 0xff", 2),
    Mutant(
        "swapped: both rows of a lane are its first",
        "epi/swapped.h",
        "return first + r;",
        "return first;",
    ),
    # Epilogues
    Mutant(
        "swiglu: maxima exchanged through one bank",
        "epi/swiglu_quantise.h",
        "barrier.meetings % 2 * (kFp8MathWarpgroups * 64)",
        "0",
    ),
    Mutant(
        "math barrier: not awaited",
        "pipe/math_barrier.h",
        "        wait_barrier(ctx, ctx.barriers().math(), meetings % 2);\n",
        "",
    ),
    Mutant(
        "math barrier: before all lanes are there",
        "pipe/math_barrier.h",
        "        hw::sync_warp();\n        if",
        "        if",
    ),
    Mutant(
        "swiglu: maxima over half a quad",
        "epi/swiglu_quantise.h",
        "mask <= 2; mask *= 2) amax[r]",
        "mask <= 1; mask *= 2) amax[r]",
    ),
    Mutant(
        "swiglu: weight dropped",
        "epi/quantise.h",
        "hw::mul(scale.inverse, weight)",
        "scale.inverse",
    ),
    Mutant(
        "swiglu: gate clamped on both sides",
        "epi/activation.h",
        "gate = hw::min_nan(gate, limit);",
        "gate = hw::max_nan(hw::min_nan(gate, limit), -limit);",
    ),
    Mutant(
        "scatter: to the wrong slot",
        "epi/scatter.h",
        "slot_row * u64(kConfig.hidden)",
        "(slot_row ^ 1) * u64(kConfig.hidden)",
    ),
    Mutant(
        "scatter: rows of a pair swapped",
        "epi/scatter.h",
        "is_second() ? partner : row, is_second() ? row : partner",
        "row, partner",
    ),
    Mutant(
        "scatter: own channels exchanged",
        "epi/scatter.h",
        "is_second() ? a.w[w] : b.w[w], kPartner",
        "is_second() ? b.w[w] : a.w[w], kPartner",
    ),
    Mutant("scatter: chunks of a quad twice", "epi/scatter.h", "hw::lane_idx() % 8", "hw::lane_idx() % 4"),
    Mutant(
        "combine: masked slots are added",
        "comm/combine.h",
        "            if (slots >> k & 1)\n                DM_UNROLL",
        "            if (true)\n                DM_UNROLL",
    ),
    Mutant(
        "combine: half of the columns",
        "comm/combine.h",
        "< kConfig.hidden)\n                hw::store_evict_first(",
        "< kConfig.hidden / 2)\n                hw::store_evict_first(",
    ),
    Mutant(
        "combine: experts of the item before",
        "comm/combine.h",
        "expert_of_lane(item + num_warps_);",
        "expert_of_lane(item);",
    ),
)
