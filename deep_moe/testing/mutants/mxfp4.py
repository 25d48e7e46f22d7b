"""Faults with MXFP4 weights: decoding, the tile in registers, epilogues of several chunks, the order of activations."""

from .mutant import Mutant

ALL, SUBNORMAL = "MXFP4", "MXFP4, subnormal"  # the cases that notice them
ROWS_24, ROWS_64, DIRECT = "MXFP4, 24-row", "MXFP4, 64-row", "MXFP4, 8-row tiles, rows"

WAIT = "        hw::wgmma_wait<0>();\n"
LOAD_SCALES = "        if constexpr (!kScalesEarly) row_scales.template load<kAhead>(round, x_sf);\n"
RELEASE = (
    "        hw::sync_warp();\n"
    "        if (hw::lane_idx() == 0) hw::mbarrier_arrive_at<barrier_bytes(kBarriers.empty(kAhead))>(round.barriers);\n"
)

MXFP4 = (
    # Tables of magnitudes
    Mutant("mxfp4: 0.5 a code too high", "mma/mxfp4.h", "(16u << 8)", "(15u << 8)", cases=SUBNORMAL),
    Mutant("mxfp4: 6 a code too low", "mma/mxfp4.h", "(12u << 24)", "(11u << 24)", cases=ALL),
    Mutant("mxfp4: zero with an exponent", "mma/mxfp4.h", "0x08080800u", "0x08080808u", cases=ALL),
    Mutant("mxfp4: exponent 0, 1 for 0.5", "mma/mxfp4.h", "0x03020100", "0x03020200", cases=SUBNORMAL),
    Mutant("mxfp4: exponent 1, 2 a code too high", "mma/mxfp4.h", "0x14100c08", "0x14100c09", cases=SUBNORMAL),
    Mutant("mxfp4: exponent 2, 0.5 a code too low", "mma/mxfp4.h", "0x0c080400", "0x0c080300", cases=SUBNORMAL),
    # Where they are not normal
    Mutant(
        "mxfp4: subnormals from one exponent further down",
        "mma/mxfp4.h",
        "kMxfp4NormalExponent = 3;",
        "kMxfp4NormalExponent = 2;",
        cases=SUBNORMAL,
    ),
    Mutant(
        "mxfp4: subnormals only where all are",
        "mma/mxfp4.h",
        "(~(exponents + kToBit7) & 0x80808080) == 0",
        "(exponents + kToBit7 & 0x80808080) != 0",
        cases=SUBNORMAL,
    ),
    Mutant(
        "mxfp4: subnormals of the second row only",
        "mma/mxfp4.h",
        "of[i] = mxfp4_magnitudes(",
        "of[i] = i < 2 ? of[i] : mxfp4_magnitudes(",
        cases=SUBNORMAL,
    ),
    # Fragments
    Mutant("mxfp4: exponents of the other row", "mma/mxfp4.h", "of[v * 2 + i / 2]", "of[2 - v * 2 + i / 2]", cases=ALL),
    Mutant("mxfp4: exponents of the other half", "mma/mxfp4.h", "of[v * 2 + i / 2]", "of[v * 2 + i % 2]", cases=ALL),
    Mutant("mxfp4: elements 0 to 3 again", "mma/mxfp4.h", "selector >> 16", "selector", cases=ALL),
    Mutant("mxfp4: signs of elements 0 to 3 again", "mma/mxfp4.h", "(word << 4 & ", "(word & ", cases=ALL),
    Mutant(
        "mxfp4: codes of one row for both",
        "mma/swapped_mxfp4.h",
        "round.codes + kAhead * kVecs + kWarpSize",
        "round.codes + kAhead * kVecs",
        cases=ALL,
    ),
    Mutant(
        "mxfp4: exponents of the other lanes of a quad",
        "mma/swapped_mxfp4.h",
        "thread.quad_lane / 2",
        "thread.quad_lane % 2",
        cases=ALL,
    ),
    # The K blocks of a tile
    Mutant(
        "swapped mxfp4: the first piece for all",
        "mma/swapped_mxfp4.h",
        "first = piece * kMxfp4PieceBytes;",
        "first = 0;",
        cases=ALL,
    ),
    Mutant(
        "swapped mxfp4: one piece of L2 for all",
        "epi/swapped.h",
        "kWarpgroupRows ? 0 : math_warp / 4;",
        "kWarpgroupRows ? 0 : 0;",
        cases=ALL,
    ),
    Mutant("swapped mxfp4: first instruction accumulates", "mma/swapped_mxfp4.h", "i != 0)", "true)", cases=ALL),
    Mutant("swapped mxfp4: registers not fenced", "mma/swapped_mxfp4.h", "hw::wgmma_fence();", "", cases=ALL),
    Mutant(
        "swapped mxfp4: partial read while it is computed",
        "mma/swapped_mxfp4.h",
        "hw::wgmma_wait<0>();\n        if",
        "hw::wgmma_wait<1>();\n        if",
        cases=ROWS_64,
    ),
    Mutant(
        "swapped mxfp4: stage released while it is read",
        "mma/swapped_mxfp4.h",
        WAIT + LOAD_SCALES + RELEASE,
        RELEASE + WAIT + LOAD_SCALES,
        cases=ROWS_64,
    ),
    Mutant(
        "swapped mxfp4: stage released before its scales are read",
        "mma/swapped_mxfp4.h",
        LOAD_SCALES + RELEASE,
        RELEASE + LOAD_SCALES,
        cases=ROWS_64,
    ),
    Mutant(
        "swapped mxfp4: next stage not awaited",
        "mma/swapped_mxfp4.h",
        "            if (!full) wait_full(ctx, stage);\n",
        "",
        cases=ROWS_64,
    ),
    Mutant("swapped mxfp4: scale of 128 L2 rows for all", "mma/swapped_mxfp4.h", "piece / 2", "0", cases=SUBNORMAL),
    Mutant("swapped mxfp4: scale of the gate for up", "mma/swapped_mxfp4.h", "L1 ? i :", "L1 ? 0 :", cases=ALL),
    Mutant(
        "swapped mxfp4: activation scales of the first stage",
        "mma/swapped_mxfp4.h",
        "slot * kConfig.block_m + scales_",
        "scales_",
        cases=ALL,
    ),
    Mutant(
        "swapped mxfp4: activation scales of the first chunk",
        "epi/swapped.h",
        "x_sf[i / 4][i % 2]",
        "x_sf[0][i % 2]",
        cases=ROWS_24,
    ),
    Mutant(
        "swapped mxfp4: direct scales of the first K block",
        "mma/swapped_mxfp4.h",
        "next[0] += kTogether, next[1] += kTogether;",
        "",
        cases=DIRECT,
    ),
    # Two stages at a time
    Mutant(
        "stages together: codes of the first in the second",
        "mma/swapped_mxfp4.h",
        "kVecs = kWeightBytes / sizeof(Vec16)",
        "kVecs = 0",
        cases=ROWS_24,
    ),
    Mutant(
        "stages together: exponents of the first in the second",
        "mma/swapped_mxfp4.h",
        "kWords = kWeightBytes / sizeof(u32)",
        "kWords = 0",
        cases=ROWS_24,
    ),
    Mutant(
        "stages together: rows of the first in the second",
        "mma/swapped_mxfp4.h",
        "kAhead * kRowBytes + i * kMmaK",
        "i * kMmaK",
        cases=ROWS_24,
    ),
    Mutant(
        "stages together: weight scales of the first in the second",
        "mma/swapped_mxfp4.h",
        "weight_scales + kAhead * kWeightScaleRecord + ",
        "weight_scales + ",
        cases=SUBNORMAL,
    ),
    Mutant(
        "stages together: activation scales of the first in the second",
        "mma/swapped_mxfp4.h",
        "round.scales + kAhead * kConfig.block_m + ",
        "round.scales + ",
        cases=ROWS_24,
    ),
    Mutant(
        "stages together: direct scales of the first in the second",
        "mma/swapped_mxfp4.h",
        "next[i] + kAhead",
        "next[i]",
        cases=DIRECT,
    ),
    Mutant(
        "stages together: the second not awaited",
        "mma/swapped_mxfp4.h",
        "wait_full(ctx, Stage{stage.slot + 1, stage.phase});",
        ";",
        cases=ROWS_64,
    ),
    Mutant(
        "stages together: the first released twice",
        "mma/swapped_mxfp4.h",
        "kBarriers.empty(kAhead)",
        "kBarriers.empty(0)",
        cases=ROWS_24,
    ),
    Mutant(
        "stages together: as many where tiles have an odd number",
        "layout/smem.h",
        " && c.l1_k_blocks() % 2 == 0 && c.l2_k_blocks() % 2 == 0 ?",
        " ?",
        cases=ALL,
    ),
    # Several chunks of rows
    Mutant(
        "chunks: a maximum of an odd number in the next row",
        "epi/swapped.h",
        "first += kHave - kKept;",
        "first += kKept;",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: of 24 rows a lane joins as of a power of two",
        "epi/swapped.h",
        "kConfig.block_m <= 16 ? kConfig.block_m : kWarpSize",
        "kConfig.block_m",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: scale of the first chunk",
        "epi/swapped.h",
        "rows.lane_of(c, r)",
        "rows.lane_of(0, r)",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: one row too many is valid",
        "epi/swapped.h",
        "thread_.chunk(chunk).row(r) < task_.rows",
        "thread_.chunk(chunk).row(r) <= task_.rows",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: weight of the first row",
        "epi/swapped.h",
        "rows.weight_of_lane(i))",
        "hw::shfl(rows.weight_of_lane(i), 0))",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: biases weighted as in the first chunk",
        "epi/swapped.h",
        "rows.weight(i / 4, i % 2)",
        "rows.weight(0, i % 2)",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: to the first chunk's rows",
        "epi/swapped.h",
        "held(chunk).slot_row, lane_of(chunk, r)",
        "held(chunk).slot_row, lane_of(0, r)",
        cases=ROWS_24,
    ),
    Mutant(
        "chunks: of 64 rows each lane has one",
        "epi/swapped.h",
        "return i * kWarpSize + hw::lane_idx();",
        "return hw::lane_idx();",
        cases=ROWS_64,
    ),
    Mutant(
        "chunks: of 64 rows a lane joins the maxima of one",
        "epi/swapped.h",
        "i * kWarpSize + hw::lane_idx() % kApart",
        "hw::lane_idx() % kApart",
        cases=ROWS_64,
    ),
    Mutant(
        "chunks: scale of the first 32 of 64 rows",
        "epi/swapped.h",
        "inverse[Rows::held_as(c)]",
        "inverse[0]",
        cases=ROWS_64,
    ),
    Mutant(
        "chunks: channels beyond hidden are stored",
        "epi/swapped.h",
        " && column < kConfig.hidden;",
        ";",
        cases=ALL,
    ),
    # The order of activations
    Mutant(
        "order of K: staged as they come",
        "kernels/stage.cuh",
        "activation_byte_of(kConfig.mma_type, channel))",
        "channel)",
        cases=ALL,
    ),
    Mutant(
        "order of K: copied as they come",
        "kernels/stage.cuh",
        "activation_byte_of(kConfig.mma_type, i + 8 * j)",
        "i + 8 * j",
        cases=ROWS_64,
    ),
    Mutant(
        "order of K: intermediate in that of channels",
        "epi/swapped.h",
        "activation_byte_of(kConfig.mma_type, channel / 2 * 2)",
        "channel / 2 * 2",
        cases=ALL,
    ),
    # With four warpgroups
    Mutant(
        "barriers: math expects the warps of FP8",
        "kernels/context.h",
        "hw::mbarrier_init(barrier(barriers().math()), kConfig.math_warps());",
        "hw::mbarrier_init(barrier(barriers().math()), kFp8MathWarpgroups * 4);",
        cases=ALL,
    ),
)
