"""The symmetric buffer's size at a bound of 8192 tokens, one rank: no larger than the best public kernel's (632 MiB for
the flash slice), known without allocating."""

import pytest

import deep_moe

MIB = 1 << 20


@pytest.mark.parametrize(
    ("hidden", "intermediate", "topk", "ranks", "most"),
    [(4096, 2048, 6, 1, 632), (4096, 2048, 6, 8, 700), (7168, 2048, 8, 1, 1276)],
    ids=["flash", "flash on 8 ranks", "v3"],
)
def test_buffer_bytes(hidden, intermediate, topk, ranks, most):
    problem = deep_moe.Problem(
        num_experts=32 * ranks, num_topk=topk, hidden=hidden, intermediate=intermediate, max_tokens_per_rank=8192
    )
    assert problem.buffer_bytes(ranks) <= most * MIB
