"""Faults inside a CTA: barriers, rings, tasks, the order of tiles, loading and announcing."""

from .mutant import Mutant

PIPELINE = (
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
    Mutant("ring: wraps one slot late", "pipe/ring.h", "== kDepth) {", "== kDepth + 1) {"),
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
        "1 + kWarpsTogether : 2",
        "1 + kWarpsTogether : 1",
    ),
    Mutant(
        "barriers: empty expects one warp less",
        "kernels/context.h",
        "hw::mbarrier_init(barrier(barriers().empty(i)), kConfig.math_warps());",
        "hw::mbarrier_init(barrier(barriers().empty(i)), kConfig.math_warps() - 1);",
    ),
    Mutant(
        "barriers: task_empty forgets LoadA", "kernels/context.h", "1 + kConfig.math_warps()", "kConfig.math_warps()"
    ),
    Mutant("barriers: not fenced before use", "kernels/context.h", "        hw::fence_mbarrier_init();\n", ""),
    Mutant("epoch: of the last launch", "kernels/context.h", "->epoch) + 1", "->epoch)"),
    Mutant("state: not published to the block", "kernels/sm90_fp8.cuh", "    hw::sync_block();\n", ""),
    # Order
    Mutant(
        "order: L1 leads by one block more than the ring holds",
        "sched/task_order.h",
        "l1_left && lead < lag_blocks_",
        "l1_left && lead <= lag_blocks_",
    ),
    Mutant(
        "order: units alternate on a ring without room for it",
        "layout/config.h",
        " &&\n               ring_blocks() >= lag_blocks + 2 * unit_blocks - 1;",
        ";",
    ),
    Mutant(
        "order: both phases of a step take the same tile",
        "sched/task_order.h",
        "tile = in_l1 ? l1_before : tile_ - l1_before;",
        "tile = l1_before;",
    ),
    Mutant(
        "order: ring slot of the next block",
        "sched/task_order.h",
        "block % ring_blocks_}",
        "(block + 1) % ring_blocks_}",
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
        "wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());",
        "",
    ),
    Mutant(
        "load: weights overwritten before they are released",
        "roles/load.h",
        "wait_barrier(ctx, Weights::empty(stage.slot), stage.empty_parity());",
        "",
    ),
    Mutant("loadB: scales not expected", "roles/load.h", "count * part_bytes + scale_bytes", "count * part_bytes"),
    Mutant(
        "loadB: scales of the next tile overwrite this one's",
        "layout/smem.h",
        "return 1 + ceil_div(ahead",
        "return ceil_div(ahead",
    ),
    Mutant("loadA: scales not expected", "roles/load.h", "rows * kBlockK + scale_bytes", "rows * kBlockK"),
    Mutant(
        "loadA: more bytes expected than come",
        "roles/load.h",
        "rows * kBlockK + scale_bytes",
        "rows * kBlockK + scale_bytes + 16",
    ),
    Mutant("loadA: the next box on top of the last", "roles/load.h", "to + row * kBlockK,", "to,"),
    Mutant("loadA: the first box again", "roles/load.h", "column, first_row + row, full", "column, first_row, full"),
    Mutant(
        "loadA: rows beyond whole boxes",
        "layout/config.h",
        "align_up(rows, box_rows())",
        "max_of(rows / box_rows() * box_rows(), box_rows())",
    ),
    Mutant("loadA: no proxy fence after the wait", "roles/load.h", "            hw::fence_proxy_async();\n", ""),
    Mutant("loadA: starts at the first row or L1 tile", "roles/load.h", "return n == count;", "return n >= 1;"),
    Mutant(
        "loadA: no second look at the rows", "roles/load.h", "if (!ready && !is_ready(ctx, task)) {", "if (false) {"
    ),
    Mutant("loadA: L1 one row short", "roles/load.h", "? task.rows :", "? task.rows - 1 :"),
    Mutant("loadA: L2 one L1 tile short", "roles/load.h", ": kConfig.l1_n_tiles();", ": kConfig.l1_n_tiles() - 1;"),
    Mutant(
        "loadA: peek relaxed",
        "roles/load.h",
        "hw::load_acquire<hw::Scope::Gpu>(ready_word",
        "hw::load_relaxed<hw::Scope::Gpu>(ready_word",
    ),
    Mutant(
        "loadB: the first quarter of a weight tile for all",
        "roles/load.h",
        " + task.n_tile % parts * part_bytes;",
        ";",
    ),
    Mutant(
        "loadB: a weight tile as if it were narrow",
        "roles/load.h",
        "from + i * kBlockBytes",
        "from + i * part_bytes",
        2,
    ),
    Mutant("loadA: the first stage again", "roles/load.h", "first_row, first_kb, full", "first_row, 0, full"),
    Mutant(
        "loadA: less expected than a whole stage",
        "roles/load.h",
        "parts * rows * kBlockK +",
        "count * rows * kBlockK +",
    ),
    Mutant("loadA: scales of the first K block only", "roles/load.h", "= count * rows * u32(", "= rows * u32("),
    # Places of the order
    Mutant(
        "places: counter of the next launch not cleared",
        "roles/dispatch.h",
        "            hw::store(header->places_taken + bank, 0u);\n",
        "",
    ),
    Mutant("places: one skipped", "roles/load.h", "next = plan.workers + taken", "next = hw::grid_dim() + 1 + taken"),
    Mutant(
        "places: one taken twice", "roles/load.h", "next = plan.workers + taken", "next = hw::grid_dim() - 1 + taken"
    ),
    Mutant(
        "places: two asked for at once",
        "roles/load.h",
        "ctx.places_taken(), 1)",
        "ctx.places_taken(), 2)",
    ),
    # Announcing stored tiles
    Mutant(
        "announce: not before a wait",
        "roles/load.h",
        "                announce(ctx, finished, entry);  // what",
        "                // what",
    ),
    Mutant("announce: not at the end", "roles/load.h", "return announce(ctx, finished, entry);", "return;"),
    Mutant(
        "announce: not after a short tile",
        "roles/load.h",
        "            announce(ctx, finished, entry);\n            ctx.trace",
        "            ctx.trace",
    ),
    Mutant(
        "announce: before the math warps have stored",
        "roles/load.h",
        "        wait_barrier(ctx, ctx.barriers().task_empty(next.slot), next.full_parity());\n",
        "",
    ),
    Mutant(
        "announce: when the math warps have begun the tile",
        "roles/load.h",
        "task_empty(next.slot), next.full_parity());",
        "task_empty((next.slot + kTaskDepth - 1) % kTaskDepth), next.phase ^ u32(next.slot == 0));",
    ),
    Mutant(
        "announce: parity flipped",
        "roles/load.h",
        "task_empty(next.slot), next.full_parity());",
        "task_empty(next.slot), next.empty_parity());",
    ),
    Mutant("announce: relaxed", "roles/load.h", "hw::add_release_gpu(finished", "hw::atomic_add_relaxed_gpu(finished"),
    Mutant("announce: as two tiles", "roles/load.h", "(finished.done, 1)", "(finished.done, 2)"),
    Mutant("announce: again and again", "roles/load.h", "        finished.done = nullptr;\n", ""),
    Mutant(
        "announce: no L2 tile",
        "roles/load.h",
        "if (ctx.num_blocks() <= kConfig.ring_blocks()) return nullptr;",
        "return nullptr;",
    ),
    Mutant(
        "announce: no L2 tile where one block has no slot of its own",
        "roles/load.h",
        "ctx.num_blocks() <= kConfig.ring_blocks()",
        "ctx.num_blocks() <= kConfig.ring_blocks() + 1",
    ),
    Mutant("announce: of the next block", "roles/load.h", "done_word(ctx, task);", "done_word(ctx, task) + 1;"),
)
