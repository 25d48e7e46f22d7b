"""Every distinct kernel of every preset compiles for SM90 without spills, local memory or serialised WGMMAs."""

import pytest

from deep_moe.cli.presets import load_presets
from deep_moe.cli.warmup import model_requests
from deep_moe.errors import JitError
from deep_moe.jit import get_kernel, get_kernels, report
from deep_moe.jit.report import complaints

RANKS = [1, 8]
MAX_TOKENS = 8192


def all_kernels() -> list:
    """One parameter per distinct kernel, named after the first model that needs it."""
    presets = load_presets()
    seen, parameters = set(), []
    for preset in presets.models:
        for request in model_requests(presets, [preset.name], RANKS, "sm_90a", MAX_TOKENS):
            if request.render() not in seen:
                seen.add(request.render())
                variant = f"-m{request.config.block_m}" if request.kind == "mega" else ""
                name = f"{preset.name}-{request.config.num_ranks}-{request.kind}{variant}"
                parameters.append(pytest.param(request, id=name))
    return parameters


@pytest.fixture(scope="module", autouse=True)
def compiled_in_parallel(request):
    """Compiles what the selected tests ask for, on all CPUs; a kernel that fails does so again in its own test."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    requests = [item.callspec.params["kernel_request"] for item in items]
    try:
        get_kernels(requests)
    except JitError:
        pass


@pytest.mark.parametrize("kernel_request", all_kernels())
def test_clean(kernel_request):
    request = kernel_request
    found = report(get_kernel(request.config, request.kind, request.arch))
    assert complaints(found) == []
    # 384 threads share 65,536 registers; setmaxnreg moves them between the warpgroups at run time.
    assert found["registers"] <= 168
