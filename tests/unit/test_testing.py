"""The harness must be able to fail: metrics, poison and routing patterns."""

import pytest
import torch

from deep_moe import testing

ROUTING = testing.Routing(num_experts=8, num_topk=2, num_ranks=2)


def draw(pattern, num_tokens=6, rank=0):
    return pattern(rank, num_tokens, testing.generator_of(0))


def test_error_sees_one_wrong_row_among_many():
    ref = torch.randn(512, 64)
    y = ref.clone()
    y[100] = y[101]
    error = testing.error_of(y, ref)
    assert error.worst_row > 0.5 and 0.01 < error.frobenius < 0.1


def test_error_sees_bias():
    ref = torch.rand(16, 64) + 0.1
    assert testing.error_of(0.69 * ref, ref).median_ratio == pytest.approx(0.69)


def test_nan_and_zero_rows_must_match():
    ref = torch.randn(4, 8)
    ref[1], ref[2] = 0, float("nan")
    assert testing.error_of(ref, ref) == (0, 0, 1)
    for row, value in [(0, float("nan")), (1, 1e-6), (2, 0.0), (3, float("inf"))]:
        y = ref.clone()
        y[row, 3] = value
        assert testing.error_of(y, ref).frobenius == float("inf")


def test_no_tokens_is_no_error():
    assert testing.error_of(torch.empty(0, 8), torch.empty(0, 8)) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8])
def test_poison_is_recognised(dtype):
    tensor = testing.poison(torch.zeros(3, 5, dtype=dtype))
    assert testing.is_poison(tensor).all()
    tensor.view(torch.uint8)[1].zero_()
    assert testing.is_poison(tensor).all(1).tolist() == [True, False, True]


def test_same_bits_tells_zeros_apart():
    assert not testing.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert testing.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_routing_patterns():
    assert all(len(set(row)) == 2 for row in draw(ROUTING.random).tolist())
    holes = draw(ROUTING.with_holes)
    assert (holes[0] == -1).all() and holes[1].tolist().count(-1) == 1
    assert (draw(ROUTING.nobody) == -1).all() and (draw(ROUTING.to_expert(5)) == 5).all()
    assert (draw(ROUTING.to_rank(1)) >= 4).all() and (draw(ROUTING.local_only, rank=0) < 4).all()
    both = torch.cat([draw(ROUTING.one_row_per_expert, rank=rank) for rank in range(2)])
    assert sorted(both[both >= 0].tolist()) == list(range(8))


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_zipf_routing(exponent):
    """One slot per token: the counts are the popularities, in an order that the seed chooses."""
    routing = testing.Routing(num_experts=8, num_topk=1, num_ranks=2)
    ids = draw(routing.zipf(exponent, seed=1), 80_000)
    counts = ids.flatten().bincount(minlength=8)
    weights = torch.arange(1, 9).double() ** -exponent
    expected = 80_000 * weights / weights.sum()
    torch.testing.assert_close(counts.sort(descending=True).values.double(), expected, rtol=0.05, atol=0)
    if exponent:
        top = [draw(routing.zipf(exponent, seed), 1000).mode(0).values.item() for seed in range(8)]
        assert len(set(top)) > 2 and top[1] == counts.argmax()


def test_zipf_routing_repeats_no_expert():
    ids = draw(ROUTING.zipf(), 1000)
    assert ids.shape == (1000, 2) and (ids[:, 0] != ids[:, 1]).all() and ids.unique().tolist() == list(range(8))


def test_activations_do_not_depend_on_the_batch():
    problem = type("Sizes", (), {"hidden": 32})
    alone, batch = (testing.random_activations(problem, n, seed=3) for n in (5, 150))
    assert torch.equal(alone, batch[:5])
