"""Checkpoints: one rank's experts of one layer, read from safetensors files into what `transform_weights` takes.

Use:
    with Checkpoint("/models/DeepSeek-V3") as checkpoint:
        for layer in checkpoint.moe_layers:
            shards = checkpoint.experts(layer, rank, num_ranks)
            l1, l2 = deep_moe.transform_weights(problem, shards.gate_up, shards.down)
"""

from .checkpoint import Checkpoint as Checkpoint
from .shards import ExpertShards as ExpertShards
