"""tests/sm90 runs on one Hopper GPU."""

import pytest
import torch


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not SM90"
    return None


@pytest.fixture(autouse=True)
def needs_sm90():
    reason = missing()
    if reason:
        pytest.skip(f"needs an SM90 GPU: {reason}")


@pytest.fixture
def device(needs_sm90) -> str:
    return "cuda"
