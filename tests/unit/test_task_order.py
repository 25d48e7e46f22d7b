"""The tile order: every tile exactly once, and nothing waits for a later tile, for any routing, lag and ring."""

import itertools
import random

import pytest

from deep_moe import _C

HIDDEN, INTERMEDIATE = 512, 384  # 2 L2 tiles, 3 L1 tiles


def make_config(num_local: int, ring_blocks: int, lag: int, unit: int, block_m: int = 64) -> _C.Config:
    return _C.Config(
        num_experts=num_local,
        num_topk=16,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        max_tokens_per_rank=4096,
        ring_rows=ring_blocks * block_m,
        block_m=block_m,
        lag_blocks=lag,
        unit_blocks=unit,
    )


ROUTINGS = {
    "empty": [0, 0, 0, 0],
    "one row": [0, 0, 1, 0],
    "one row each": [1, 1, 1, 1],
    "hot expert": [0, 3000, 0, 5],
    "hot last": [1, 0, 0, 2500],
    "129 rows": [129, 129, 0, 129],
    "ragged": [63, 64, 65, 700],
}
SHAPES = [(4, 1, 2), (4, 2, 2), (6, 3, 4), (8, 4, 2), (40, 24, 8), (64, 1, 8)]  # ring blocks, lag, unit


def check_order(config: _C.Config, rows: list[int]) -> None:
    tasks = _C.task_order(config, rows)
    ring = config.ring_rows // config.block_m

    # Exactly the tiles that the rows ask for, each once.
    expected, block, block_rows = set(), 0, []
    for expert, count in enumerate(rows):
        for first in range(0, count, config.block_m):
            valid = min(config.block_m, count - first)
            expected |= {(1, expert, block, n, valid, block % ring) for n in range(3)}
            expected |= {(2, expert, block, n, valid, block % ring) for n in range(2)}
            block_rows.append(valid)
            block += 1
    assert len(tasks) == len(expected)
    assert set(tasks) == expected

    # Dependencies point backwards: L2(b) to all of L1(b); L1(b), through the pull, to all of L2(b - ring).
    position = {}
    for index, (phase, _, b, *_rest) in enumerate(tasks):
        first, _last = position.get((phase, b), (index, index))
        position[phase, b] = (first, index)
    for b in range(len(block_rows)):
        assert position[1, b][1] < position[2, b][0]
        if b >= ring:
            assert position[2, b - ring][1] < position[1, b][0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("block_m", [64, 128])
def test_order_of_known_routings(shape, routing, block_m):
    ring, lag, unit = shape
    check_order(make_config(4, ring, lag, unit, block_m), ROUTINGS[routing])


def test_order_of_random_routings():
    rng = random.Random(0)
    for _ in range(300):
        unit, lag = rng.randint(1, 8), rng.randint(1, 24)
        ring = lag + unit + rng.randint(0, 5)
        ring += ring % 2
        local = rng.randint(1, 12)
        rows = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 1500)]) for _ in range(local)]
        check_order(make_config(local, ring, lag, unit), rows)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 132])
def test_ctas_share_the_sequence(num_sms):
    config = make_config(4, 12, 6, 4)
    rows = [130, 0, 900, 64]
    sequence = _C.task_order(config, rows)
    shares = [_C.task_order(config, rows, num_sms, cta) for cta in range(num_sms)]
    for cta, share in enumerate(shares):
        assert share == sequence[cta::num_sms]


def test_l2_follows_l1_by_the_lag():
    """L1 leads by at least the lag while it lasts, and never by more than lag + unit - 1 blocks (the ring's size)."""
    lag, unit = 6, 4
    config = make_config(4, 12, lag, unit)
    tasks = _C.task_order(config, [700, 64, 900, 640])
    total = 1 + max(t[2] for t in tasks)
    l1_started, l2_started = 0, 0
    for phase, _, block, *_rest in tasks:
        if phase == 1:
            l1_started = max(l1_started, block + 1)
            assert l1_started - l2_started <= lag + unit - 1 + unit  # the unit of L2 that frees it may be running
        else:
            l2_started = max(l2_started, block + 1)
            assert l1_started == total or l1_started - block > lag - unit


def test_units_share_weight_tiles():
    """Inside a unit the row block moves fastest: neighbouring CTAs read the same weight tile."""
    config = make_config(2, 24, 8, 4)
    tasks = _C.task_order(config, [256, 256])
    first_unit = tasks[:12]
    assert [(t[2], t[3]) for t in first_unit] == [(b, n) for n, b in itertools.product(range(3), range(4))]


@pytest.mark.parametrize(
    ("ring", "lag", "unit"),
    [(4, 4, 4), (8, 8, 2)],
)
def test_a_ring_too_small_for_the_lag_is_refused(ring, lag, unit):
    config = make_config(4, ring, lag, unit)
    assert "ring" in config.error()
    with pytest.raises(ValueError, match="ring"):
        _C.task_order(config, [64, 0, 0, 0])
