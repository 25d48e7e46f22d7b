"""tests/dist runs on two or more Hopper GPUs of one host."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def needs_two_gpus():
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        pytest.skip(f"needs two GPUs: {count} found")
