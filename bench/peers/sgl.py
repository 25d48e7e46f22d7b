"""sgl-deep-gemm 0.1.4.post1 (PyPI), the public SM90 FP8 mega MoE in two kernels.

    pip install --no-deps --target DIR sgl-deep-gemm==0.1.4.post1 apache-tvm-ffi==0.1.11
    PYTHONPATH=DIR python bench/mega.py --peers sgl

It accumulates over all of K in one tensor-core chain (31 % of the magnitude lost on same-sign inputs), and wants an
NCCL group also for one rank, int64 ids and block scales as DeepSeek's checkpoints hold them.
"""

import importlib.metadata

import deep_gemm
import torch
import torch.distributed as dist

from deep_moe import reference


class Peer:
    def __init__(self, shape, ranks, weights, max_tokens: int) -> None:
        ranks.connect()
        self.version = f"sgl-deep-gemm {importlib.metadata.version('sgl-deep-gemm')}"
        self.max_tokens = max_tokens
        self.l1, self.l2 = deep_gemm.transform_weights_for_mega_moe_sm90(weights.fused_gate_up(), weights.down)
        experts = shape.experts_per_rank * ranks.size
        self.buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, experts, max_tokens, shape.topk, shape.hidden, shape.intermediate
        )

    def stage(self, staged: reference.Staged) -> None:
        rows = staged.x.shape[0]
        self.buffer.x[:rows].copy_(staged.x)
        self.buffer.x_sf[:rows].copy_(staged.x_sf)
        self.buffer.topk_idx[:rows].copy_(staged.topk_idx)
        self.buffer.topk_weights[:rows].copy_(staged.topk_weights)

    def call(self, y: torch.Tensor) -> None:
        deep_gemm.fp8_mega_moe(y, self.l1, self.l2, self.buffer)

    def close(self) -> None:
        self.buffer.destroy()
