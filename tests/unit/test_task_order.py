"""The tile order: every tile exactly once, and nothing waits for a later tile, for any routing, lag and ring.

CTAs that take places of the order as they get ready finish for any timing, soon, and at the same time.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from deep_moe import _C

HIDDEN, INTERMEDIATE, L1_TILES, L2_TILES = 768, 256, 2, 3  # of 256 weight rows; 8-row blocks have 12 L2 tiles of 64


def make_config(
    num_local: int, ring_blocks: int, lag: int, unit: int, block_m: int = 64, num_ranks: int = 1
) -> _C.Config:
    """L1 and L2 units interleave with more than one rank, if the ring has room for it."""
    return _C.Config(
        num_ranks=num_ranks,
        num_experts=num_local * num_ranks,
        num_topk=16,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        max_tokens_per_rank=4096,
        ring_rows=-(-ring_blocks * block_m // 128) * 128,
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
    ring = config.ring_blocks
    assert (config.l1_n_tiles, config.l2_n_tiles) == (L1_TILES, 12 if config.block_m == 8 else L2_TILES)

    # Exactly the tiles that the rows ask for, each once.
    expected, block, block_rows = set(), 0, []
    for expert, count in enumerate(rows):
        for first in range(0, count, config.block_m):
            valid = min(config.block_m, count - first)
            expected |= {(1, expert, block, n, valid, block % ring) for n in range(L1_TILES)}
            expected |= {(2, expert, block, n, valid, block % ring) for n in range(config.l2_n_tiles)}
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
@pytest.mark.parametrize("block_m", [8, 64, 128])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_order_of_known_routings(shape, routing, block_m, num_ranks):
    ring, lag, unit = shape
    check_order(make_config(4, ring, lag, unit, block_m, num_ranks), ROUTINGS[routing])


def test_order_of_random_routings():
    rng = random.Random(0)
    for _ in range(300):
        unit, lag = rng.randint(1, 8), rng.randint(1, 24)
        ring = lag + unit + rng.randint(0, 5) + rng.choice([0, unit])
        ring += ring % 2
        local = rng.randint(1, 12)
        rows = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 1500)]) for _ in range(local)]
        for num_ranks in (1, 3):
            check_order(make_config(local, ring, lag, unit, num_ranks=num_ranks), rows)
        check_order(make_config(local, ring, lag, unit, block_m=8), [n // 8 for n in rows])


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
    first_unit = tasks[: 4 * L1_TILES]
    assert [(t[2], t[3]) for t in first_unit] == [(b, n) for n, b in itertools.product(range(L1_TILES), range(4))]


def test_units_of_both_phases_alternate():
    """With several ranks: once L1 leads by the lag, 2 L1 tiles and 3 L2 tiles share any 5 places."""
    tasks = _C.task_order(make_config(1, 16, 8, 4, num_ranks=2), [64 * 40])
    phases = [task[0] for task in tasks]
    ahead, total, after = 8 * L1_TILES, 40 * 5, 8 * L2_TILES
    assert phases[:ahead] == [1] * ahead and phases[total - after :] == [2] * after
    together = phases[ahead : total - after]
    for begin in range(len(together) - 5):
        assert together[begin : begin + 5].count(1) == L1_TILES


@pytest.mark.parametrize(("ring", "interleaved"), [(14, False), (16, True)])
def test_units_alternate_only_where_the_ring_has_room(ring, interleaved):
    """The unit that L1 is in, the lag, and the unit that L2 is in: 8 + 2 * 4 - 1 blocks."""
    rows = [64 * 40]
    alone, shared = (_C.task_order(make_config(1, ring, 8, 4, num_ranks=ranks), rows) for ranks in (1, 2))
    assert (alone != shared) == interleaved and sorted(alone) == sorted(shared)


def test_units_of_swapped_operands_never_alternate():
    """8-row blocks: their 12 L2 tiles on 2 ranks would alternate with L1 tiles, but the weights are what counts."""
    rows = [8 * 40]
    alone, shared = (_C.task_order(make_config(1, 16, 8, 4, 8, ranks), rows) for ranks in (1, 2))
    assert alone == shared
    phases = [task[0] for task in shared]
    assert phases[: 8 * L1_TILES + 4 * 12] == [1] * 8 * L1_TILES + [2] * 4 * 12  # the lag, then a unit of L2


@pytest.mark.parametrize(
    ("ring", "lag", "unit"),
    [(4, 4, 4), (8, 8, 2)],
)
def test_a_ring_too_small_for_the_lag_is_refused(ring, lag, unit):
    config = make_config(4, ring, lag, unit)
    assert "ring" in config.error()
    with pytest.raises(ValueError, match="ring"):
        _C.task_order(config, [64, 0, 0, 0])


class Timing(NamedTuple):
    """How long things take, in any unit. Called for every tile, with its CTA, for every pulled row, for every CTA."""

    tile: Callable[[int], float] = lambda cta: 1.0
    row: Callable[[], float] = lambda: 0.005
    start: Callable[[], float] = lambda: 0.0  # of a CTA
    ahead: int = 0  # how many tiles before it is ready for it a CTA takes a place


class Simulation:
    """CTAs at work. Mirrors roles/load.h and comm/pull.h; the emulator runs those themselves, but on a few CTAs only.

    CTA c's first place is c; further ones come from a counter of all CTAs, and a CTA computes the tiles of its places
    in ascending order. Its two pull warps take rows w, w + warps, ... A row waits until the block that had its ring
    slot before is through with L2, an L1 tile for the rows of its block, an L2 tile for all L1 tiles of its block.

    Every time is computed from earlier steps: waiting for a tile that nobody has taken yet is a failure, even where
    another CTA would come and take it.
    """

    def __init__(self, config: _C.Config, rows: list[int], num_ctas: int, timing: Timing, order=_C.task_order):
        self.timing = timing
        self.config = config
        self.block_rows = [min(config.block_m, n - first) for n in rows for first in range(0, n, config.block_m)]
        self.stored = {(phase, b): [] for phase in (1, 2) for b in range(len(self.block_rows))}  # times, by tile
        self.arrived: list[float] = []  # time of each block's last row
        self.pulled_rows = 0
        self.pull_warps = [0.0] * (2 * num_ctas)  # free from when on
        self.ctas = [[timing.start()] for _ in range(num_ctas)]  # start, then the times when its tiles are stored

        asking = []  # (time, CTA)
        for place, (phase, _, block, *_rest) in enumerate(order(config, rows)):
            cta = place if place < num_ctas else heapq.heappop(asking)[1]
            done = self.ctas[cta]
            ready = self.rows_arrived(block) if phase == 1 else self.all_stored(1, block, tiles=L1_TILES)
            done.append(max(ready, done[-1]) + timing.tile(cta))
            self.stored[phase, block].append(done[-1])
            heapq.heappush(asking, (done[max(0, len(done) - 1 - timing.ahead)], cta))

    def all_stored(self, phase: int, block: int, tiles: int) -> float:
        assert len(self.stored[phase, block]) == tiles, "waits for a tile that nobody has taken: a dead-lock"
        return max(self.stored[phase, block])

    def rows_arrived(self, block: int) -> float:
        """Pulls the rows up to this block's last."""
        while len(self.arrived) <= block:
            b = len(self.arrived)
            ring, l2_tiles = self.config.ring_blocks, self.config.l2_n_tiles
            slot_free = self.all_stored(2, b - ring, tiles=l2_tiles) if b >= ring else 0.0
            last = 0.0
            for _ in range(self.block_rows[b]):
                warp = self.pulled_rows % len(self.pull_warps)
                self.pull_warps[warp] = max(self.pull_warps[warp], slot_free) + self.timing.row()
                last = max(last, self.pull_warps[warp])
                self.pulled_rows += 1
            self.arrived.append(last)
        return self.arrived[block]

    @property
    def num_tiles(self) -> int:
        return sum(map(len, self.stored.values()))

    @property
    def ends(self) -> list[float]:
        """When each CTA has stored its last tile; its start, if it has none."""
        return [done[-1] for done in self.ctas]


def random_rows(rng: random.Random, most: int) -> list[int]:
    """Of some experts: a hot one, the last one only, one row each, some empty, all alike."""
    local = rng.randint(1, 16)
    rows = [rng.choice([0, 1, 64, 65, rng.randint(0, most // local)]) for _ in range(local)]
    rows[rng.randrange(local)] = most
    return rng.choice([rows, [0] * (local - 1) + [most], [1] * local, rows[:-1] + [0], [most // local] * local])


def test_dynamic_places_finish_for_any_timing():
    """On the smallest ring and larger ones; CTAs start, compute and pull as fast as they like."""
    rng = random.Random(1)
    for _ in range(400):
        unit, lag, num_ctas = rng.randint(1, 8), rng.randint(1, 24), rng.choice([1, 2, 3, 7, 60, 132])
        block_m = rng.choice([8, 64, 128])
        ring = lag + unit - 1 + rng.choice([0, 0, 1, 9]) + rng.choice([0, unit])
        ring += ring % 2 if block_m == 64 else 0
        rows = random_rows(rng, rng.randint(1, 5000 if block_m > 8 else 800))
        config = make_config(len(rows), ring, lag, unit, block_m, num_ranks=rng.choice([1, 2]))
        tile_cost = [rng.choice([1, 1, 1, 0.1, 20]) for _ in range(num_ctas)]
        row_cost = rng.choice([0.001, 0.1, 3])
        timing = Timing(
            tile=lambda cta, cost=tile_cost: cost[cta] * rng.uniform(0.1, 2),
            row=lambda cost=row_cost: cost * rng.random(),
            start=lambda: rng.choice([0, 0, 0, 50 * rng.random()]),
            ahead=rng.randint(0, 3),
        )
        simulation = Simulation(config, rows, num_ctas, timing)
        assert simulation.num_tiles == len(_C.task_order(config, rows))
        assert simulation.pulled_rows == sum(rows)


def test_the_simulation_notices_a_dead_lock():
    """All of L1 before L2, on a ring that is smaller than that."""
    config = make_config(1, 8, 4, 2)
    with pytest.raises(AssertionError, match="dead-lock"):
        Simulation(config, [640], 3, Timing(), order=lambda *given: sorted(_C.task_order(*given)))
    assert Simulation(config, [512], 3, Timing(), order=lambda *given: sorted(_C.task_order(*given))).num_tiles == 40


@pytest.mark.parametrize("num_ctas", [1, 2, 7, 60, 132])
@pytest.mark.parametrize("ahead", [0, 1])
def test_dynamic_places_end_soon_and_together(num_ctas, ahead):
    """Tiles that cost the same, L1 ahead by more tiles than CTAs have taken, and a ring that does not hold it back."""
    rng = random.Random(num_ctas)
    for _ in range(12):
        unit = rng.randint(1, 8)
        lag = -(-num_ctas * (1 + ahead) // L2_TILES) + unit
        ring = 2 * lag + unit
        rows = random_rows(rng, rng.randint(1, 100 * num_ctas))
        config, timing = make_config(len(rows), ring + ring % 2, lag, unit), Timing(ahead=ahead)
        simulation = Simulation(config, rows, num_ctas, timing)
        num_tiles = simulation.num_tiles
        critical_path = max(Simulation(config, rows, max(1, num_tiles), timing).ends)  # a CTA per tile
        pulling = sum(rows) * timing.row() / (2 * num_ctas)
        assert max(simulation.ends) <= critical_path + pulling + num_tiles / num_ctas + 1
        if num_tiles >= 2 * num_ctas:
            assert max(simulation.ends) - min(simulation.ends) <= 1.1
