"""Device memory of transform_weights: beyond the result, one expert at most."""

import pytest
import torch

import deep_moe
from deep_moe import testing


@pytest.mark.parametrize("in_place", [False, True])
def test_peak_of_transform_weights(needs_sm90, in_place):
    problem = deep_moe.Problem(num_experts=8, num_topk=2, hidden=4096, intermediate=2048, max_tokens_per_rank=64)
    weights = testing.random_weights(problem, device="cuda")
    gate_up = weights.fused_gate_up()
    out = (gate_up[0], weights.down[0]) if in_place else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = deep_moe.transform_weights(problem, gate_up, weights.down, out=out)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert beyond <= 3 * problem.hidden * problem.intermediate, f"{beyond} bytes beyond {result}"
