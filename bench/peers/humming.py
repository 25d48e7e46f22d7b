"""humming-kernels 0.1.19 (PyPI), public grouped GEMMs of FP8 tokens and MXFP4 weights: the layer's two GEMMs alone.

    pip install --no-deps --target DIR humming-kernels==0.1.19
    PYTHONPATH=DIR LD_LIBRARY_PATH=FOLDER_OF_NVRTC python bench/mega.py --mma-type fp8xmxfp4 --peers humming,humming-128

A call is two launches, L1 and L2, on rows that stand sorted by expert and quantised in memory (its GEMM type
"grouped_contiguous"), with bf16 results and the tiles that its own heuristics choose for the number of rows. Dispatch,
activation, requantisation and combine are not run: a fused layer that takes no longer hides all of them. L2 multiplies
what L1 gives for the staged tokens, activated and requantised outside the timed span. "humming" has one fp32 scale a
token, and "humming-128", slower with many rows, one per token and 128 columns as our layer; there the scales of a
column stand together, so that the kernel's copy engine can load them.

It compiles a kernel for each GEMM and number of rows, in about 2 s, and keeps it in ~/.humming. For that it needs CUDA
headers (of a toolkit, or of `humming-kernels[cu13]`) and NVRTC's folder on LD_LIBRARY_PATH.
"""

import os
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from deep_moe import reference, testing
from peers import Unsupported

os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # else its import starts processes

import humming  # noqa: E402
from humming import ops  # noqa: E402
from humming.kernel.humming import HummingKernel  # noqa: E402
from humming.layer import HummingLayer  # noqa: E402
from humming.tune import get_heuristics_config  # noqa: E402
from humming.utils.nvrtc import get_nvrtc_library_path  # noqa: E402

AMAX_FLOOR = 1e-10
CHECKED_ROWS = 64


def require_nvrtc() -> None:
    """SystemExit where its compiler would fail: a program that is told where libnvrtc is, but not libnvrtc-builtins."""
    try:
        folder = os.path.dirname(os.path.realpath(get_nvrtc_library_path()))
    except RuntimeError as error:
        raise SystemExit(f"peer humming finds no NVRTC to compile with: {error}") from error
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if folder not in [os.path.realpath(each) for each in listed]:
        raise SystemExit(
            f"peer humming compiles only with NVRTC's folder on LD_LIBRARY_PATH: export LD_LIBRARY_PATH={folder}"
        )


@dataclass
class Rows:
    """Quantised rows of one GEMM."""

    codes: Tensor  # e4m3 [R, K]
    scales: Tensor  # f32 [R, G], of K / G columns each

    @classmethod
    def of(cls, values: Tensor, group: int) -> "Rows":
        """Quantise f32 [R, K] with a scale for every `group` columns, or for the whole row if that is 0."""
        groups = values.unflatten(1, (-1, group or values.shape[1]))
        amax = groups.abs().amax(2, keepdim=True).clamp_min(AMAX_FLOOR)
        scales = amax / torch.full_like(amax, reference.E4M3_MAX)
        return cls((groups / scales).to(torch.float8_e4m3fn).flatten(1), scales[..., 0])

    def take(self, at: Tensor) -> "Rows":
        """Rows `at`, in this order."""
        return Rows(self.codes.view(torch.uint8)[at].view(self.codes.dtype), self.scales[at])

    def double(self) -> Tensor:
        """float64 [R, K]: the numbers that are meant."""
        groups = self.codes.double().unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales.double()[..., None]).flatten(1)


class Gemm:
    """One grouped GEMM: the weights of all experts, and the rows of the last call.

    Args:
        weights: MXFP4 of [E, N, K]: u8 [E, N, K/2] and e8m0 codes u8 [E, N, K/32]. They are copied.
        group: columns of a row that share a scale; 0: all of them.
    """

    def __init__(self, weights: tuple[Tensor, Tensor], group: int) -> None:
        self.codes, self.scales = weights
        self.device = self.codes.device
        experts, n, half = self.codes.shape
        with self.device:
            self.layer = HummingLayer(
                shape_n=n,
                shape_k=2 * half,
                num_experts=experts,
                weight_config={"quant_method": "mxfp4"},
                input_config={"dtype": "float8e4m3", "group_size": group},
                torch_dtype=torch.bfloat16,
            )
        self.layer.load_from_tensors({"weight": self.codes, "weight_scale": self.scales})
        self.layer.transform()
        self.options = {"gemm_type": "grouped_contiguous", "use_m_major_input_scale": group > 0}

    def prepare(self, rows: Rows, owners: Tensor) -> None:
        """Take R >= 1 rows, sorted by expert; i64 [R] `owners` are the experts. Compiles for a new number of rows."""
        self.rows, self.owners = rows, owners
        count, config = len(owners), self.layer.humming_config
        tile = get_heuristics_config(config, shape_m=count, device=self.device, **self.options)
        kernels = HummingKernel.prepare_kernels(config.to_str(), self.options, tile, device=self.device)
        experts, n = self.codes.shape[:2]
        sizes = torch.bincount(owners, minlength=experts)
        scales = rows.scales
        if self.options["use_m_major_input_scale"]:
            scales = pad(scales.T, (0, -count % 4))
        self.y = testing.poison(torch.empty(count, n, dtype=torch.bfloat16, device=self.device))
        self.launch = partial(
            ops.launch_kernel,
            configs=kernels,
            inputs=rows.codes,
            weight=self.layer.weight,
            weight_scale=self.layer.weight_scale,
            weight_scale_2=getattr(self.layer, "weight_scale_2", None),
            input_scale=scales.contiguous(),
            outputs=self.y,
            expert_layout=pad(sizes.cumsum(0), (1, 0)).to(torch.int32),  # where an expert's rows begin
            locks=self.layer.locks,
        )

    def error(self) -> float:
        """Relative Frobenius error of y against the product in float64, of a spread of rows."""
        count = len(self.owners)
        at = torch.linspace(0, count - 1, min(count, CHECKED_ROWS)).long().to(self.device)
        rows, owners = self.rows.take(at).double(), self.owners[at]
        wanted = rows.new_empty(len(at), self.codes.shape[1])
        for expert in owners.unique().tolist():
            w = reference.dequantize_mxfp4(self.codes[expert], self.scales[expert], torch.float64)
            wanted[owners == expert] = rows[owners == expert] @ w.T
        return testing.error_of(self.y[at], wanted).frobenius


class Peer:
    """Both GEMMs with one scale a token."""

    group = 0  # columns of a row that share a scale; 0: all of them
    part = "GEMMs alone"

    def __init__(self, shape, ranks, weights: testing.Weights, max_tokens: int) -> None:
        if ranks.size > 1:
            raise Unsupported(f"it runs on one rank, and there are {ranks.size}")
        if shape.hidden % reference.GROUP or shape.intermediate % reference.GROUP:
            raise Unsupported(f"hidden {shape.hidden} and intermediate {shape.intermediate} must be multiples of 128")
        require_nvrtc()
        scales = f"a scale per token and {self.group} columns" if self.group else "a scale per token"
        self.version = f"humming-kernels {humming.__version__}: {self.part}, {scales}"
        self.max_tokens = max_tokens
        self.activation = reference.Activation(clamp=shape.activation_clamp)
        self.l1, self.l2 = (Gemm(each, self.group) for each in (weights.fused_gate_up(), weights.down))
        self.staged: reference.Staged | None = None

    def stage(self, staged: reference.Staged) -> None:
        """Sort and quantise the rows of both GEMMs; again with the same `staged`, nothing. One pair at least must have
        an expert."""
        if staged is self.staged:
            return
        ids = staged.topk_idx.flatten().long()
        pairs = ids.argsort(stable=True)[int((ids < 0).sum()) :]
        owners = ids[pairs]
        x = Rows.of(reference.dequantize_rows(staged.x, staged.x_sf), self.group)
        self.l1.prepare(x.take(pairs // staged.topk_idx.shape[1]), owners)
        self.l1.launch()
        act = self.activation(*self.l1.y.float().chunk(2, 1)) * staged.topk_weights.flatten()[pairs, None]
        self.l2.prepare(Rows.of(act, self.group), owners)
        self.staged = staged

    def call(self, y: Tensor) -> None:
        """L1 and L2 of the staged rows; y stays as it is."""
        self.l1.launch()
        self.l2.launch()

    def part_error(self) -> float:
        """That of the worse GEMM."""
        return max(self.l1.error(), self.l2.error())

    def close(self) -> None:
        del self.l1, self.l2, self.staged


class PeerPer128(Peer):
    """Both GEMMs with one scale per token and 128 columns."""

    group = reference.GROUP
