"""The executable contract: what the kernels compute, in plain torch, on any device.

* `stage`: what `deep_moe.stage` writes into the symmetric buffer.
* `layer`: the fused layer with the kernel's own roundings (fp32 sums promoted every 128 of K, requantised activations,
  bf16 slots, bf16 result). A kernel may differ only by how its tensor core adds up 128 products.
* `exact_layer`: the same layer in float64 on the same operands, with no requantisation and no rounding at all.
* `encode_mxfp4`: the e4m3 weights and block scales that kernels multiply in place of MXFP4; the layers call it.
* `recv_counts`: what `cumulative_local_expert_recv_stats` grows by in one call.

Nothing here knows of ranks: a token's result depends on nothing but the token. A test of R ranks calls `layer` once per
rank, or once for the tokens of all ranks together, with the weights of all experts.
"""

from deep_moe.reference.activation import Activation
from deep_moe.reference.layer import Biases, Staged, exact_layer, layer, recv_counts, split_gate_up, stage
from deep_moe.reference.mxfp4 import dequantize_mxfp4, encode_mxfp4, quantize_mxfp4
from deep_moe.reference.quant import (
    E4M3_MAX,
    GROUP,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
)

__all__ = [
    "E4M3_MAX",
    "GROUP",
    "Activation",
    "Biases",
    "Staged",
    "dequantize_blocks",
    "dequantize_mxfp4",
    "dequantize_rows",
    "encode_mxfp4",
    "exact_layer",
    "layer",
    "quantize_blocks",
    "quantize_mxfp4",
    "quantize_rows",
    "recv_counts",
    "split_gate_up",
    "stage",
]
