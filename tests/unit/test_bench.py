"""The arithmetic of bench/: floors and ratios must not flatter."""

import importlib.util
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def shapes():
    spec = importlib.util.spec_from_file_location("bench_shapes", BENCH / "shapes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def h200(shapes):
    return shapes.Ceilings(read_gbs=4550, fp8_tflops=1390)


@pytest.mark.parametrize(
    "name, tokens, touched, us",
    [
        ("flash", 8192, 32, 1780),
        ("flash", 64, 32, 177),
        ("flash", 1, 6, 33.2),
        ("v3", 8192, 32, 4152),
        ("v3", 64, 32, 310),
    ]
    + [("pro", 8192, 48, 4670), ("flash", 0, 0, 0)],
)
def test_floors(shapes, h200, name, tokens, touched, us):
    """Weights over bandwidth or flops over peak, by hand."""
    assert shapes.floor_us(shapes.SHAPES[name], tokens, 1, touched, h200) == pytest.approx(us, rel=5e-3)


def test_the_wire_can_be_the_floor(shapes):
    """Half of the rows of two ranks cross: one byte a channel there, two back."""
    slow = shapes.Ceilings(read_gbs=4550, fp8_tflops=1390, nvlink_gbs=37)
    flash = shapes.SHAPES["flash"]
    assert flash.wire_bytes(8192, 1) == 0
    assert shapes.floor_us(flash, 8192, 2, 32, slow) == pytest.approx(8192 * 6 / 2 * 3 * 4096 / 37e3)


def test_touched_experts_counts_this_rank_only(shapes):
    ids = [torch.tensor([[0, 5], [5, -1]]), torch.tensor([[4, 9]])]
    assert [shapes.touched_experts(ids, rank, 4) for rank in range(3)] == [1, 2, 1]


def test_unknown_shapes_are_named(shapes):
    with pytest.raises(SystemExit, match="nope.*flash"):
        shapes.shape_of("nope", None)
    assert shapes.shape_of("v3", 4).experts_per_rank == 4
