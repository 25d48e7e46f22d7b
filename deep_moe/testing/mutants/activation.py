"""Faults in activations with numbers of their own, and in expert biases."""

from .mutant import Mutant

ACTIVATION = (
    Mutant("swigluoai: up without one", "epi/activation.h", "hw::add(up, 1.0f)", "up"),
    Mutant("swigluoai: alpha left out", "epi/activation.h", "hw::mul(alpha, -kLog2e)", "-kLog2e"),
    # Biases
    Mutant(
        "bias: after the clamp",
        "epi/swiglu_quantise.h",
        "        if constexpr (kConfig.bias) TileBiases<kConfig, kSplit>::add_to_l1(ctx, task, tile, acc);\n"
        "        if (ctx.params.activation_clamp <= kLargestFloat) clamp(acc, ctx.params.activation_clamp);\n",
        "        if (ctx.params.activation_clamp <= kLargestFloat) clamp(acc, ctx.params.activation_clamp);\n"
        "        if constexpr (kConfig.bias) TileBiases<kConfig, kSplit>::add_to_l1(ctx, task, tile, acc);\n",
    ),
    Mutant("bias: of gate for up and the other way round", "epi/biases.h", "is_up = i / 4,", "is_up = 1 - i / 4,"),
    Mutant("bias: channels of a pair swapped", "epi/biases.h", "channel = i % 2;", "channel = 1 - i % 2;"),
    Mutant("bias: of L1 from the first thread of a quad", "epi/biases.h", " + tile.quad_lane * 32", ""),
    Mutant("bias: of L2 from the first thread of a quad", "epi/biases.h", " + tile.quad_lane * 8", ""),
    Mutant("bias: channels of L2 in the order of chunks", "epi/biases.h", "chunk * 2 + i % 2", "i % 2 * 2 + chunk"),
    Mutant("bias: of a piece for both", "epi/biases.h", "tile.piece_column(p) + ", "tile.piece_column(0) + ", 2),
    Mutant("bias: top-k weight left out", "epi/biases.h", "{rows.weight(0), rows.weight(1)}", "{1.0f, 1.0f}"),
    Mutant("bias: top-k weight of the other row", "epi/biases.h", "row = i / 2 % 2;", "row = 1 - i / 2 % 2;"),
    Mutant("bias: of the first expert", "kernels/context.h", "task.expert * bias_floats(", "0 * bias_floats("),
    Mutant("bias: of the first tile", "kernels/context.h", " + task.n_tile * tile_weight_rows(task.kind)", ""),
    Mutant(
        "bias: of L1 for both",
        "kernels/context.h",
        "params.l1_biases : params.l2_biases",
        "params.l1_biases : params.l1_biases",
    ),
    Mutant("swapped bias: left out", "roles/swapped_math.h", "if constexpr (kConfig.bias)", "if constexpr (false)"),
    Mutant("swapped bias: of gate for up", "epi/swapped.h", "(kIsL1 ? 1 : 2)", "(kIsL1 ? 0 : 2)"),
    Mutant("swapped bias: of the next channel", "epi/swapped.h", "(kIsL1 ? 1 : 2)", "1"),
    Mutant(
        "swapped bias: weighted in L1",
        "epi/swapped.h",
        "hw::add(value, bias[p][i / 2 % 2])",
        "hw::fma(rows.weight(i / 4, i % 2), bias[p][i / 2 % 2], value)",
    ),
    Mutant(
        "swapped bias: top-k weight of the first row",
        "epi/swapped.h",
        "rows.weight(i / 4, i % 2)",
        "rows.weight(i / 4, 0)",
    ),
    Mutant(
        "swapped bias: of one warpgroup's pieces for both",
        "epi/swapped.h",
        "first_group<kKind>(thread.math_warp) + p);\n            const float*",
        "first_group<kKind>(0) + p);\n            const float*",
    ),
)
