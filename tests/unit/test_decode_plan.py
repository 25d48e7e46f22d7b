"""Weights decoded ahead (include/deep_moe/sched/decode_plan.h): the order of weight tiles, and the CTAs that decode."""

import random

import pytest

from deep_moe import _C, Problem, testing

MIN_DEPTH = _C.kMinDecodedSlots // 2


def config_of(**fields) -> "_C.Config":
    sizes = dict(num_experts=8, hidden=832, intermediate=416, ring_rows=16384, lag_blocks=4, unit_blocks=4)
    return _C.Config(
        **sizes | dict(decoded_slots=128, mma_type=_C.MmaType.Fp8xMxfp4, block_m=128, decode_ahead=True) | fields
    )


def test_weight_tiles_come_in_the_order_of_tiles():
    rng = random.Random(1)
    for _ in range(50):
        unit = rng.randint(1, 4)
        config = config_of(unit_blocks=unit, lag_blocks=rng.randint(1, 9))
        rows = [rng.choice([0, 1, 128, 129, rng.randint(1, 1200)]) for _ in range(8)]
        tiles = _C.weight_order(config, rows, unit)
        assert all(1 <= readers <= unit for *_, readers in tiles)
        tasks = [(phase, expert, n_tile) for phase, expert, _, n_tile, *_ in _C.task_order(config, rows)]
        assert [tuple(where) for *where, readers in tiles for _ in range(readers)] == tasks


@pytest.mark.parametrize("ctas", [2, 3, 4, 5, 16, 33, 132])
@pytest.mark.parametrize("slots", [16, 128, 1024])
def test_every_tile_can_be_read_while_it_is_decoded(ctas, slots):
    """What the argument against dead-locks needs, whatever has come."""
    config = config_of(decoded_slots=slots, unit_blocks=16)
    for experts, blocks in [(0, 0), (1, 1), (8, 8), (8, 100), (1, 5000)]:
        decoders, workers, unit, depth = _C.decode_plan(config, ctas, experts, blocks)
        assert decoders >= 1 and decoders + workers == ctas
        assert 1 <= unit <= 16 and workers >= unit
        assert MIN_DEPTH <= depth and 2 * decoders * depth <= slots


def test_decoders_are_as_many_as_the_work_wants():
    """A decoder makes a K block in about the time in which it is multiplied with one row block."""
    config = config_of(num_experts=32, decoded_slots=1024, unit_blocks=16)
    one, four, twelve = (_C.decode_plan(config, 132, 32, 32 * blocks)[0] for blocks in (1, 4, 12))
    assert one > 60 and 25 <= four <= 32 and 10 <= twelve <= 12
    assert _C.decode_plan(config.replace(block_m=64, decode_ahead=False), 132, 32, 400)[:2] == (0, 132)


def test_one_cta_cannot_do_both():
    sizes = dict(num_experts=2, num_topk=1, hidden=64, intermediate=32, max_tokens_per_rank=8)
    problem = Problem(**sizes, mma_type="fp8xmxfp4", overrides=dict(decode_ahead=1))
    with testing.World(problem, num_sms=1) as world:
        with pytest.raises(ValueError, match="num_sms is 1; MXFP4 weights and many tokens need at least 2"):
            world.call(world.inputs([8]))
