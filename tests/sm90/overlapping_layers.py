"""Layers in a process with one buffer, where `stage` and the layer overlap: run by test_overlap.py."""

import sys

import torch

import deep_moe
from deep_moe import testing

PROBLEM = deep_moe.Problem(num_experts=16, num_topk=4, hidden=1024, intermediate=512, max_tokens_per_rank=8192)
COUNTS = (8192, 1, 0, 64, 4096, 7, 8192, 300)  # a long stage behind a short one, and the other way round
ROUNDS = 5


def main() -> int:
    weights = testing.random_weights(PROBLEM, device="cuda")
    l1, l2 = deep_moe.transform_weights(PROBLEM, weights.gate_up, weights.down)
    buffer = deep_moe.SymmBuffer(None, PROBLEM)
    generator = torch.Generator("cuda").manual_seed(0)
    layers = []
    for count in COUNTS:
        x = torch.randn(count, PROBLEM.hidden, generator=generator, device="cuda").bfloat16()
        scores = torch.rand(count, PROBLEM.num_experts, generator=generator, device="cuda")
        weight, ids = scores.topk(PROBLEM.num_topk)
        layers.append((x, ids, weight))

    def run(layer, y) -> None:
        deep_moe.stage(buffer, *layer)
        deep_moe.fp8_mega_moe(y, l1, l2, buffer)

    def outputs(between) -> list[torch.Tensor]:
        results = [torch.full_like(layer[0], float("nan")) for layer in layers]
        for layer, y in zip(layers, results, strict=True):
            run(layer, y)
            between()
        torch.cuda.synchronize()
        return results

    apart = outputs(torch.cuda.synchronize)
    together = [outputs(lambda: None) for _ in range(ROUNDS)]
    graph_results = [torch.full_like(layer[0], float("nan")) for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, y in zip(layers, graph_results, strict=True):
            run(layer, y)
    for _ in range(ROUNDS):
        for y in graph_results:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        together.append([y.clone() for y in graph_results])
    buffer.destroy()
    wrong = [
        f"round {i}, {len(one)} tokens"
        for i, seen in enumerate(together)
        for one, other in zip(apart, seen, strict=True)
        if not testing.same_bits(one, other)
    ]
    print("\n".join(wrong) or f"{len(together) * len(COUNTS)} layers have the same bits")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
