"""Options, fixtures and skips shared by all tests.

Layer cases are written once, in tests/cases, against the fixture `worlds`; tests/emu runs them on the emulator,
tests/sm90 on a GPU. The directory decides the device.
"""

import os

import pytest
import torch

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # eight ranks on one GPU; read when the context is made
torch.set_num_threads(1)  # the reference of a test is small, and pytest-xdist fills the cores
pytest.register_assert_rewrite("cases", "deep_moe.testing.harness")

from geometries import GEOMETRIES  # noqa: E402

from deep_moe import testing  # noqa: E402


def pytest_addoption(parser):
    group = parser.getgroup("deep_moe")
    group.addoption("--mma-type", default="fp8xfp8", choices=["fp8xfp8", "fp8xmxfp4"], help="kernels under test")
    group.addoption("--arch", default="sm_90a", choices=["sm_90a"], help="architecture of the emulated kernels")
    group.addoption("--ranks", default="1,2,4,8", help="rank counts to test, comma-separated")
    group.addoption("--seeds", type=int, default=2, help="emulator schedules to try where a test varies them")
    group.addoption("--all", action="store_true", help="also the tests marked `extended`")


def pytest_xdist_auto_num_workers(config):
    """Ranks that share a GPU fill it and wait for each other: one process at a time there. Else one per core."""
    return 0 if torch.cuda.is_available() else os.cpu_count()


def pytest_configure(config):
    config.addinivalue_line("markers", "extended: long; runs with --all")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        skip = pytest.mark.skip(reason="extended test: runs with --all")
        for item in items:
            if item.get_closest_marker("extended"):
                item.add_marker(skip)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


@pytest.fixture(scope="session")
def wanted_ranks(pytestconfig) -> set[int]:
    return {int(n) for n in pytestconfig.getoption("--ranks").split(",")}


@pytest.fixture
def device() -> str:
    """What `LocalGroup` takes. tests/sm90 overrides it."""
    return "cpu"


class Worlds:
    """Makes each world once and keeps it; one whose call failed is replaced."""

    def __init__(self, device: str, wanted_ranks: set[int], mma_type: str):
        self.device, self.wanted_ranks, self.mma_type = device, wanted_ranks, mma_type
        self.made: dict[tuple, testing.World] = {}
        self.weights: dict[tuple, testing.Weights] = {}

    def __call__(
        self,
        name: str,
        clamp: float | None = None,
        alpha: float | None = None,
        distribution: str = "zero-mean",
        num_sms: int | None = None,
        weights_seed: int = 0,
    ) -> testing.World:
        geometry = GEOMETRIES[name]
        if geometry.ranks not in self.wanted_ranks:
            pytest.skip(f"{geometry.ranks} ranks are not in --ranks")
        key = name, clamp, alpha, distribution, num_sms, weights_seed
        world = self.made.get(key)
        if world is None or world.broken:
            problem = geometry.problem(clamp, alpha, self.mma_type)
            world = self.made[key] = testing.World(
                problem, geometry.ranks, self.device, self.weights_of(problem, distribution, weights_seed), num_sms
            )
        return world

    def alone(self, name: str) -> testing.World:
        """With no other buffer on the device: launches of several are ordered, which costs the host time."""
        self.close()
        self.made.clear()
        return self(name)

    def weights_of(self, problem, distribution: str, seed: int) -> testing.Weights:
        """All worlds of one model hold the same bytes."""
        sizes = problem.num_experts, problem.hidden, problem.intermediate
        key = sizes, problem.mma_type, problem.bias, distribution, seed
        if key not in self.weights:
            self.weights[key] = testing.random_weights(problem, distribution, seed, self.device)
        return self.weights[key]

    def close(self) -> None:
        for world in self.made.values():
            if not world.broken:
                world.close()


@pytest.fixture(scope="session")
def worlds_of_devices(wanted_ranks, pytestconfig):
    made: dict[str, Worlds] = {}
    yield lambda device: made.setdefault(device, Worlds(device, wanted_ranks, pytestconfig.getoption("--mma-type")))
    for worlds in made.values():
        worlds.close()


@pytest.fixture
def worlds(device, worlds_of_devices) -> Worlds:
    return worlds_of_devices(device)
