"""An unfused chain of three Triton kernels, replayed from one CUDA graph: what a fused layer must beat at few tokens.

    python bench/mega.py --peers chain --tokens 1,2,4,8,16,32,64

gate_up_kernel (gather, GEMM, SwiGLU, requantisation), down_kernel (GEMM), combine_kernel. No kernel sorts rows: every
program of a GEMM finds its expert's rows among the ids of all pairs (token, slot), which are few enough to stand in
registers. A touched expert's weights are read once, but for more than BLOCK_M rows, which hardly happens; the grid
holds any routing. Kernels begin while their predecessor ends (programmatic dependent launch). Roundings are those of
`deep_moe.reference.layer`. One rank, at most MAX_PAIRS pairs. With TRITON_INTERPRET=1 `Chain` runs on the CPU.
"""

import torch
import triton
import triton.language as tl
from timing import captured
from torch import Tensor

from deep_moe import reference, testing
from peers import Unsupported

MAX_PAIRS = 512  # ids that a program searches
GROUP = tl.constexpr(reference.GROUP)
E4M3_MAX = tl.constexpr(reference.E4M3_MAX)
AMAX_FLOOR = tl.constexpr(1e-10)
NUM_WARPS = 4
NUM_SMS = 132
SHARED_BYTES = 228 << 10  # of an SM
RESERVED_BYTES = 1 << 10  # of it for the system, of each program
MAX_STAGES = 6
COMBINE_CHANNELS = 512
E4M3 = torch.float8_e4m3fn
OVERLAP = not triton.knobs.runtime.interpret  # the interpreter knows no instructions of the GPU


@triton.jit
def _nth_touched(ids, nth, BINS: tl.constexpr):
    """(expert, its rows) of the nth expert that has rows; beyond the last, 0 rows. `ids`: i32, -1 = no expert."""
    rows = tl.histogram(ids, BINS, mask=ids >= 0)
    used = (rows > 0).to(tl.int32)
    here = (used > 0) & (tl.cumsum(used, 0) == nth + 1)
    return tl.sum(tl.where(here, tl.arange(0, BINS), 0), 0), tl.sum(tl.where(here, rows, 0), 0)


@triton.jit
def _pairs_of(ids, expert, first, BLOCK_M: tl.constexpr):
    """i32 [BLOCK_M]: which pairs are an expert's rows from its row `first` on; 0 beyond its last."""
    chosen = ids == expert
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    wanted = first + tl.arange(0, BLOCK_M)
    hit = chosen[None, :] & (place[None, :] == wanted[:, None])
    return tl.sum(tl.where(hit, tl.arange(0, ids.shape[0])[None, :], 0), 1)


@triton.jit
def _scales(w_sf, x_sf, real, k, TILE: tl.constexpr):
    """Of one block of K: the weights' first and last (perhaps the same) 128 rows, and the rows of x."""
    HEIGHT: tl.constexpr = TILE // GROUP
    w_sf += k * HEIGHT
    return tl.load(w_sf), tl.load(w_sf + HEIGHT - 1), tl.load(x_sf + k, mask=real, other=0.0)


@triton.jit
def _gemm(w, w_sf, x, x_sf, rows, real, DEPTH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr):
    """f32 [TILE, BLOCK_M]: a weight tile times rows of x, promoted every 128 of K.

    The weights are the operand that wgmma wants 64 rows of, so that few rows of x are no waste. `w` points to e4m3
    [DEPTH / 128, TILE, 128], `w_sf` to f32 [DEPTH / 128, TILE / 128]; `x` to e4m3 [any, DEPTH].
    """
    BLOCKS: tl.constexpr = DEPTH // GROUP
    channel, depth = tl.arange(0, TILE), tl.arange(0, GROUP)
    w += channel[:, None] * GROUP + depth[None, :]
    x += depth[:, None] + rows[None, :] * DEPTH
    x_sf += rows * BLOCKS
    acc = tl.zeros([TILE, BLOCK_M], tl.float32)
    first, last, row_scale = _scales(w_sf, x_sf, real, 0, TILE)
    for k in range(BLOCKS):
        # Triton pipelines only what a dot reads; scales would be waited for in every step.
        coming = _scales(w_sf, x_sf, real, tl.minimum(k + 1, BLOCKS - 1), TILE)
        partial = tl.dot(tl.load(w + k * (TILE * GROUP)), tl.load(x + k * GROUP, mask=real[None, :], other=0.0))
        acc += partial * (tl.where(channel < GROUP, first, last)[:, None] * row_scale[None, :])
        first, last, row_scale = coming
    return acc


@triton.jit
def _swiglu(gate, up, CLAMP: tl.constexpr):
    """silu(gate) * up; with a clamp, gate <= CLAMP and |up| <= CLAMP first."""
    if CLAMP is not None:
        gate, up = tl.minimum(gate, CLAMP), tl.clamp(up, -CLAMP, CLAMP)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,  # e4m3 [T, HIDDEN]
    x_sf,  # f32 [T, HIDDEN / 128]
    topk_idx,  # i32 [num_pairs]
    topk_weights,  # f32 [num_pairs]
    w,  # e4m3 [E, INTERMEDIATE / 128, HIDDEN / 128, 256, 128], gate rows first
    w_sf,  # f32 [E, INTERMEDIATE / 128, HIDDEN / 128, 2]
    act,  # e4m3 [num_pairs, INTERMEDIATE], out
    act_sf,  # f32 [num_pairs, INTERMEDIATE / 128], out
    num_pairs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOPK: tl.constexpr,
    CLAMP: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (tile, nth touched expert): 128 channels of the activation, requantised, of all its rows."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile, pair = tl.program_id(0), tl.arange(0, PAIRS)
    TILES: tl.constexpr = INTERMEDIATE // GROUP
    ids = tl.load(topk_idx + pair, mask=pair < num_pairs, other=-1)
    expert, count = _nth_touched(ids, tl.program_id(1), BINS)
    at = (expert * TILES + tile).to(tl.int64)
    w += at * (2 * GROUP * HIDDEN)
    w_sf += at * (2 * HIDDEN // GROUP)
    first = 0
    while first < count:  # not a range: Triton's interpreter cannot make one of a tensor with NumPy 2.4
        pairs = _pairs_of(ids, expert, first, BLOCK_M)
        real = first + tl.arange(0, BLOCK_M) < count
        weight = tl.load(topk_weights + pairs)
        acc = _gemm(w, w_sf, x, x_sf, pairs // TOPK, real, HIDDEN, 2 * GROUP, BLOCK_M)
        gate, up = tl.split(acc.reshape(2, GROUP, BLOCK_M).permute(1, 2, 0))
        values = _swiglu(gate, up, CLAMP) * weight[None, :]
        amax = tl.maximum(tl.max(tl.abs(values), 0), AMAX_FLOOR)
        codes = (values * tl.div_rn(E4M3_MAX, amax)[None, :]).to(tl.float8e4nv)
        column = tile * GROUP + tl.arange(0, GROUP)
        tl.store(act + pairs[None, :] * INTERMEDIATE + column[:, None], codes, mask=real[None, :])
        tl.store(act_sf + pairs * TILES + tile, tl.div_rn(amax, E4M3_MAX), mask=real)
        first += BLOCK_M


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    act,
    act_sf,
    topk_idx,
    w,  # e4m3 [E, HIDDEN / 128, INTERMEDIATE / 128, 128, 128]
    w_sf,  # f32 [E, HIDDEN / 128, INTERMEDIATE / 128]
    slots,  # bf16 [num_pairs, HIDDEN], out
    num_pairs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (tile, nth touched expert): 128 channels of the result of all its rows, each in the slot of its pair."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile, pair = tl.program_id(0), tl.arange(0, PAIRS)
    ids = tl.load(topk_idx + pair, mask=pair < num_pairs, other=-1)
    expert, count = _nth_touched(ids, tl.program_id(1), BINS)
    at = (expert * (HIDDEN // GROUP) + tile).to(tl.int64)
    w += at * (GROUP * INTERMEDIATE)
    w_sf += at * (INTERMEDIATE // GROUP)
    first = 0
    while first < count:  # not a range: Triton's interpreter cannot make one of a tensor with NumPy 2.4
        pairs = _pairs_of(ids, expert, first, BLOCK_M)
        real = first + tl.arange(0, BLOCK_M) < count
        if OVERLAP:
            tl.extra.cuda.gdc_wait()  # only programs with rows read what gate_up_kernel writes
        acc = _gemm(w, w_sf, act, act_sf, pairs, real, INTERMEDIATE, GROUP, BLOCK_M)
        column = tile * GROUP + tl.arange(0, GROUP)
        tl.store(slots + pairs[None, :] * HIDDEN + column[:, None], acc.to(tl.bfloat16), mask=real[None, :])
        first += BLOCK_M


@triton.jit
def combine_kernel(
    slots,
    topk_idx,
    y,  # bf16 [T, HIDDEN], out
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (part of the channels, token): the sum of the slots that have an expert, in ascending order."""
    column, token = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    total = tl.zeros([CHANNELS], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for k in tl.static_range(TOPK):
        slot = tl.load(slots + (token * TOPK + k) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total = tl.where(tl.load(topk_idx + token * TOPK + k) >= 0, total + slot.to(tl.float32), total)
    tl.store(y + token * HIDDEN + column, total.to(tl.bfloat16), mask=column < HIDDEN)


def _tiles(w: Tensor, rows: int) -> Tensor:
    """u8 [E, N / rows, K / 128, rows, 128] of e4m3 [E, N, K]: a tile in the order in which it is read."""
    return w.view(torch.uint8).unflatten(2, (-1, reference.GROUP)).unflatten(1, (-1, rows)).transpose(2, 3)


def _stages(programs: int, tile: int, block_m: int) -> int:
    """How many blocks of K fit into an SM's shared memory beside each other, with one program there or two."""
    room = SHARED_BYTES if programs <= NUM_SMS else SHARED_BYTES // 2
    return min(MAX_STAGES, (room - RESERVED_BYTES) // ((tile + block_m) * reference.GROUP))


class Chain:
    """The layer on one device: weights of all experts, the staged tokens, and what passes between the kernels."""

    def __init__(self, shape, weights: testing.Weights, max_tokens: int) -> None:
        self.shape, self.tokens = shape, 0
        self.max_tokens = min(max_tokens, MAX_PAIRS // shape.topk)
        device, pairs = weights.down[0].device, self.max_tokens * shape.topk
        (gate, gate_sf), (up, up_sf) = weights.gate_up
        down, self.down_sf = weights.down
        self.gate_up = torch.cat([_tiles(gate, reference.GROUP), _tiles(up, reference.GROUP)], 3).view(E4M3)
        self.gate_up_sf = torch.stack([gate_sf, up_sf], -1)
        self.down = _tiles(down, reference.GROUP).contiguous().view(E4M3)

        def rows(count: int, width: int) -> tuple[Tensor, Tensor]:
            codes = torch.empty(count, width, dtype=E4M3, device=device)
            return codes, torch.empty(count, width // reference.GROUP, device=device)

        self.x, self.x_sf = rows(self.max_tokens, shape.hidden)
        self.act, self.act_sf = rows(pairs, shape.intermediate)
        self.topk_idx = torch.empty(self.max_tokens, shape.topk, dtype=torch.int32, device=device)
        self.topk_weights = torch.empty(self.max_tokens, shape.topk, device=device)
        self.slots = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device=device)

    def stage(self, staged: reference.Staged) -> None:
        """Copy in at most max_tokens tokens."""
        self.tokens = staged.x.shape[0]
        for mine, given in zip((self.x, self.x_sf, self.topk_idx, self.topk_weights), staged, strict=True):
            mine[: self.tokens].copy_(given)

    def launch(self, y: Tensor) -> None:
        """bf16 y [tokens, H] of the staged tokens, at least one; three kernels on the current stream."""
        shape, sizes = self.shape, {"HIDDEN": self.shape.hidden, "OVERLAP": OVERLAP}
        gate_up = self.x, self.x_sf, self.topk_idx, self.topk_weights, self.gate_up, self.gate_up_sf
        options = {"TOPK": shape.topk, "CLAMP": shape.activation_clamp}
        self._gemm(gate_up_kernel, shape.intermediate, 2, *gate_up, self.act, self.act_sf, **sizes, **options)
        down = self.act, self.act_sf, self.topk_idx, self.down, self.down_sf
        self._gemm(down_kernel, shape.hidden, 1, *down, self.slots, **sizes, launch_pdl=OVERLAP)
        parts = triton.cdiv(shape.hidden, COMBINE_CHANNELS)
        options = {"TOPK": shape.topk, "CHANNELS": COMBINE_CHANNELS, "launch_pdl": OVERLAP}
        combine_kernel[parts, self.tokens](self.slots, self.topk_idx, y, **sizes, **options)

    def _gemm(self, kernel, channels: int, matrices: int, *operands, **options) -> None:
        """Launch a GEMM with programs of 128 output channels, each of `matrices` weight matrices."""
        experts, pairs, tiles = self.shape.experts_per_rank, self.tokens * self.shape.topk, channels // reference.GROUP
        touched = min(pairs, experts)  # at most, by any routing
        # Twice the mean of even routing: hardly an expert has more rows, and its weights would be read again for them.
        block_m = 16 if pairs <= 8 * experts else 32
        kernel[tiles, touched](
            *operands,
            pairs,
            INTERMEDIATE=self.shape.intermediate,
            BINS=triton.next_power_of_2(experts),
            PAIRS=max(32 * NUM_WARPS, triton.next_power_of_2(pairs)),  # one of each thread: fewer variants
            BLOCK_M=block_m,
            num_warps=NUM_WARPS,
            num_stages=_stages(tiles * touched, matrices * reference.GROUP, block_m),
            **options,
        )


class Peer(Chain):
    """The chain behind a CUDA graph for each number of tokens and y."""

    def __init__(self, shape, ranks, weights: testing.Weights, max_tokens: int) -> None:
        if ranks.size > 1:
            raise Unsupported(f"it runs on one rank, and there are {ranks.size}")
        if shape.hidden % reference.GROUP or shape.intermediate % reference.GROUP:
            raise Unsupported(f"hidden {shape.hidden} and intermediate {shape.intermediate} must be multiples of 128")
        super().__init__(shape, weights, max_tokens)
        self.version = f"chain of three kernels for up to {self.max_tokens} tokens, Triton {triton.__version__}"
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def call(self, y: Tensor) -> None:
        """Replay; the first call with these tokens and this y compiles and captures."""
        key = self.tokens, y.data_ptr()
        if key not in self.graphs:
            self.launch(y)
            self.graphs[key] = captured(lambda: self.launch(y))
        self.graphs[key].replay()

    def close(self) -> None:
        self.graphs.clear()
