"""CASES "Buffers": 24 to 27."""

import pytest
import torch

import deep_moe
from deep_moe import reference, testing
from deep_moe.ops import OPS


def rank_problem(**changes) -> deep_moe.Problem:
    fields = dict(num_experts=2, num_topk=1, hidden=128, intermediate=128, max_tokens_per_rank=200)
    return deep_moe.Problem(**(fields | changes))


@pytest.mark.parametrize(
    "name, value", [("max_tokens_per_rank", 100), ("num_experts", 4), ("hidden", 256), ("num_topk", 2)]
)
def test_ranks_that_disagree_all_get_the_same_error(device, name, value):
    """24."""

    def body(group):
        try:
            deep_moe.SymmBuffer(group, rank_problem(**({name: value} if group.rank() else {})))
        except deep_moe.MismatchError as error:
            return str(error)
        return None

    messages = deep_moe.LocalGroup(2, device).run(body)
    assert messages[0] and messages[0] == messages[1]
    assert name in messages[0]


def on_each_rank(world, body):
    """body(rank) raises before any launch; afterwards the world still works."""
    world.run(body)
    world.call_and_check(world.inputs([3, 2]))


def wrong_arguments(rank):
    """25: (what must be named, a call)."""
    problem, device = rank.problem, rank.device
    t, h, k = 4, problem.hidden, problem.num_topk
    x = torch.zeros(t, h, dtype=torch.bfloat16, device=device)
    idx = torch.zeros(t, k, dtype=torch.int32, device=device)
    weights = torch.zeros(t, k, device=device)
    y = torch.zeros(t, h, dtype=torch.bfloat16, device=device)
    many = problem.max_tokens_per_rank + 1

    def stage(x=x, idx=idx, weights=weights, **options):
        return lambda: deep_moe.stage(rank.buffer, x, idx, weights, **options)

    def mega(y=y, l1=rank.l1, l2=rank.l2, **options):
        return lambda: OPS[rank.problem.mma_type](y, l1, l2, rank.buffer, **options)

    return [
        ("x", TypeError, stage(x=[1.0])),
        ("x", ValueError, stage(x=x.float())),
        ("x", ValueError, stage(x=x[:, : h // 2])),
        ("x", ValueError, stage(x=x.T.contiguous().T)),
        ("x", ValueError, stage(x=x[0])),
        ("max_tokens_per_rank|at most", ValueError, stage(x=x[:1].expand(many, h), idx=idx[:1].expand(many, k),
                                                          weights=weights[:1].expand(many, k))),
        ("topk_idx", ValueError, stage(idx=idx.float())),
        ("topk_idx", ValueError, stage(idx=torch.zeros(t, k + 1, dtype=torch.int32, device=device))),
        ("topk_idx", ValueError, stage(idx=idx[:2])),
        ("topk_weights", ValueError, stage(weights=weights.half())),
        ("topk_weights", ValueError, stage(weights=weights[:2])),
        ("num_tokens", ValueError, stage(num_tokens=torch.zeros(2, dtype=torch.int32, device=device))),
        ("num_tokens", ValueError, stage(num_tokens=torch.zeros(1, device=device))),
        ("y", TypeError, mega(y=None)),
        ("y", ValueError, mega(y=y.float())),
        ("y", ValueError, mega(y=y[:, :64])),
        ("y", ValueError, mega(y=y.T.contiguous().T)),
        ("num_tokens_bound", ValueError, mega(num_tokens_bound=many)),
        ("num_tokens_bound", ValueError, mega(num_tokens_bound=-1)),
        ("cumulative_local_expert_recv_stats", ValueError,
         mega(cumulative_local_expert_recv_stats=torch.zeros(7, dtype=torch.int32, device=device))),
        ("cumulative_local_expert_recv_stats", ValueError,
         mega(cumulative_local_expert_recv_stats=torch.zeros(1, device=device))),
        ("l1", ValueError, mega(l1=rank.l2)),
        ("l2", ValueError, mega(l2=rank.l1)),
    ]  # fmt: skip


def test_wrong_arguments_raise_before_anything_is_launched(worlds):
    """25: too many tokens, wrong dtype, shape, stride: each error names the argument; then a normal call is right."""
    inputs = worlds("small").inputs([4, 4])

    def body(rank):
        rank.stage(rank.put(inputs[rank.group.rank()]))  # the world is shared: other tests staged other counts
        for i, (name, kind, call) in enumerate(wrong_arguments(rank)):
            try:
                with pytest.raises(kind, match=name):
                    call()
            except BaseException as error:
                raise AssertionError(f"wrong argument {i} ({name}): {error!r}") from error

    on_each_rank(worlds("small"), body)


def test_a_y_smaller_than_the_staged_tokens_is_refused(worlds):
    """25."""
    inputs = worlds("small").inputs([4, 4])

    def body(rank):
        rank.stage(rank.put(inputs[rank.group.rank()]))
        y = torch.zeros(3, rank.problem.hidden, dtype=torch.bfloat16, device=rank.device)
        with pytest.raises(ValueError, match="y"):
            rank.mega(y)

    on_each_rank(worlds("small"), body)


def test_tensors_on_another_device_are_refused(worlds):
    """25."""
    inputs = worlds("small").inputs([4, 4])

    def body(rank):
        x, idx, weights, _ = rank.put(inputs[rank.group.rank()])
        with pytest.raises(ValueError, match="x.*meta"):
            deep_moe.stage(rank.buffer, x.to("meta"), idx, weights)

    on_each_rank(worlds("small"), body)


def test_destroy_twice_and_in_any_order(device):
    """26."""

    def body(group):
        problem = rank_problem()
        first, second = deep_moe.SymmBuffer(group, problem), deep_moe.SymmBuffer(group, problem)
        second.destroy()
        first.destroy()
        first.destroy()
        x = torch.zeros(1, 128, dtype=torch.bfloat16, device=first_device(device))
        ids, weights = torch.zeros(1, 1, dtype=torch.int32, device=x.device), torch.ones(1, 1, device=x.device)
        with pytest.raises(ValueError, match="destroyed"):
            deep_moe.stage(first, x, ids, weights)
        return True

    assert deep_moe.LocalGroup(2, device).run(body) == [True, True]


def test_a_buffer_left_to_the_finaliser(device):
    """26: dropping the last reference cleans up locally, with a warning, and never waits for other ranks."""

    def body(group):
        deep_moe.SymmBuffer(group, rank_problem())

    with pytest.warns(ResourceWarning, match="destroy"):
        deep_moe.LocalGroup(2, device).run(body)
        import gc

        gc.collect()


def test_weights_reloaded_in_place(worlds):
    """27: `out=` keeps the addresses, and the cached plan uses the new bytes."""
    world = worlds("small", weights_seed=5)
    fresh = worlds("small", weights_seed=6)
    inputs = world.inputs([10, 20])
    old = world.call_and_check(inputs)

    def reload(rank):
        w = fresh.weights.of_rank(rank.group.rank(), rank.group.size()).to(rank.device)
        l1, l2 = deep_moe.transform_weights(rank.problem, w.gate_up, w.down, out=(rank.l1, rank.l2))
        assert l1 is rank.l1 and l2 is rank.l2

    world.run(reload)
    results = world.call(inputs)
    fresh.check(inputs, results)
    assert not testing.same_bits(old[0].y, results[0].y)
    world.broken = True  # its weights are no longer those of its key


def test_weights_round_trip(worlds):
    """`dequantize()` gives the natural layout back, for fused and for separate gate and up."""
    world = worlds("main-2")

    def body(rank):
        own = world.weights.of_rank(rank.group.rank(), rank.group.size())
        l1, l2 = deep_moe.transform_weights(rank.problem, own.fused_gate_up(), own.down)
        fp8 = rank.problem.mma_type == "fp8xfp8"
        dequantise = reference.dequantize_blocks if fp8 else reference.dequantize_mxfp4
        natural = torch.cat([dequantise(*part) for part in own.gate_up], 1)
        for ours in (rank.l1, l1):
            assert torch.equal(ours.dequantize().float(), natural.float())
        assert torch.equal(l2.dequantize().float(), dequantise(*own.down).float())

    world.run(body)


def first_device(device) -> torch.device:
    return torch.device(device if isinstance(device, str) else device[0])
