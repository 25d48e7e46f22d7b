"""Every distinct kernel of every preset, and of layers like those of gpt-oss, compiles for SM90 without spills, local
memory or serialised WGMMAs, and with nothing in the way of the WGMMAs."""

import struct

import pytest

from deep_moe import _C
from deep_moe.cli.presets import Preset, Presets, load_presets
from deep_moe.cli.warmup import model_requests
from deep_moe.errors import JitError
from deep_moe.jit import get_kernel, get_kernels, report
from deep_moe.jit.report import complaints

RANKS = [1, 8]
MAX_TOKENS = 8192
# FP8 weights with biases and the other activation, together and apart. The models themselves have MXFP4 weights.
OSS = dict(num_topk=4, hidden=2880, intermediate=2880)
BESIDE_PRESETS = {
    "oss-32": dict(OSS, num_experts=32, activation="swigluoai", bias=True),
    "oss-128": dict(OSS, num_experts=128, activation="swigluoai", bias=True),
    "oss-128-swiglu": dict(OSS, num_experts=128, bias=True),
    "oss-128-no-bias": dict(OSS, num_experts=128, activation="swigluoai"),
}
# Opcodes of SM90: FP8 wgmma, with A from shared memory and from registers; move to a uniform register; branch; bulk
# copy and TMA load.
QGMMAS, R2UR, BRANCH, COPIES = (0x9F3, 0xDF3), 0x2CA, 0x947, (0x3BA, 0x5B4)


def all_kernels() -> list:
    """One parameter per distinct kernel, named after the first model that needs it."""
    presets = Presets(load_presets().models + [Preset(*item) for item in BESIDE_PRESETS.items()])
    seen, parameters = set(), []
    for preset in presets.models:
        for request in model_requests(presets, [preset.name], RANKS, "sm_90a", MAX_TOKENS):
            if request.render() not in seen:
                seen.add(request.render())
                variant = f"-m{request.config.block_m}" if request.kind == "mega" else ""
                name = f"{preset.name}-{request.config.num_ranks}-{request.kind}{variant}"
                parameters.append(pytest.param(request, id=name))
    return parameters


KERNELS = all_kernels()


@pytest.fixture(scope="module", autouse=True)
def compiled_in_parallel(request):
    """Compiles what the selected tests ask for, on all CPUs; a kernel that fails does so again in its own test."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    requests = [item.callspec.params["kernel_request"] for item in items]
    try:
        get_kernels(requests)
    except JitError:
        pass


@pytest.mark.parametrize("kernel_request", KERNELS)
def test_clean(kernel_request):
    request = kernel_request
    found = report(get_kernel(request.config, request.kind, request.arch))
    assert complaints(found) == []
    # 384, 512 or 640 threads share 65,536 registers; setmaxnreg moves them between the warpgroups at run time.
    if request.kind == "mega":
        assert found["registers"] <= {384: 168, 512: 128, 640: 96}[request.config.num_threads]


def instructions(cubin: bytes) -> list[int]:
    """Opcodes (12 bits) of a cubin's only kernel."""
    return [word & 0xFFF for word in instruction_words(cubin)]


def instruction_words(cubin: bytes) -> list[int]:
    """Lower halves of the instructions: the opcode, and of a branch whether it asks all lanes (bit 32)."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        if cubin[headers[names][4] + name :].startswith(b".text."):
            return [word for (word,) in struct.iter_unpack("<Q8x", cubin[offset : offset + length])]
    raise AssertionError("no code")


@pytest.mark.parametrize("kernel_request", [each for each in KERNELS if "mega" in each.id])
def test_descriptors_stay_in_uniform_registers(kernel_request):
    """Nothing is moved to a uniform register shortly before a wgmma: it cost 5 % of a layer where it happened.

    Whether ptxas keeps a loop's variables in uniform registers can change with any edit of any role.
    """
    request = kernel_request
    code = instructions(get_kernel(request.config, request.kind, request.arch).read())
    wgmmas = [at for at, opcode in enumerate(code) if opcode in QGMMAS]
    if request.config.decodes_ahead:
        pytest.skip("math warps that can also decode leave the loop too few of them in some layers: bench/NOTES.md")
    # With swapped operands the place of the stage may be moved before its first wgmma, once: there memory is the limit,
    # or decoding.
    before = 0 if request.config.swaps_operands else 20
    for group in groups_of(wgmmas, request.config):
        first, last = group[0], group[-1]
        assert R2UR not in code[first - before : last], f"instructions {first - before} to {last}"


@pytest.mark.parametrize("kernel_request", [each for each in KERNELS if "mega" in each.id])
def test_copies_are_not_issued_lane_by_lane(kernel_request):
    """ptxas knows that one thread issues them (hw::elect_one). Otherwise each is in a loop over the active lanes: five
    times the clocks, which cost 0.8 % of a layer of 8192 tokens."""
    request = kernel_request
    words = instruction_words(get_kernel(request.config, request.kind, request.arch).read())
    copies = [at for at, word in enumerate(words) if word & 0xFFF in COPIES]
    assert len(copies) >= 5  # weights, their scales, rows, their scales, pulled rows
    for at in copies:
        behind = words[at + 1]
        assert behind & 0xFFF != BRANCH or not behind >> 32 & 1, f"instruction {at}"  # BRA.U.ANY: while lanes are left


def groups_of(wgmmas: list[int], config) -> list[list[int]]:
    """Places of the wgmmas that are issued one after the other, four for each piece of a tile.

    The pieces of a block of 8 rows are issued in turns: the two of an L1 stage, the four K blocks of an L2 stage and
    those of its last one, if they are fewer. With MXFP4 weights there is one piece, in L1 (also of rows that are not
    pulled) and in L2, or two, one stage after the other.
    """
    if config.mma_type == _C.MmaType.Fp8xMxfp4 and config.swaps_operands:
        loops = 3 if config.block_m == 8 and config.num_ranks == 1 else 2
        together = 1 if config.l1_k_blocks % 2 or config.l2_k_blocks % 2 else 2
        assert len(wgmmas) == 4 * loops * together
        return [wgmmas[at : at + 4] for at in range(0, len(wgmmas), 4)]
    if not config.swaps_operands:
        assert len(wgmmas) == (12 if config.block_m == 128 else 4)
        return [wgmmas[at : at + 4] for at in range(0, len(wgmmas), 4)]
    apart = 60  # instructions between stages: scales, promotion, barriers
    cuts = [i for i in range(1, len(wgmmas)) if wgmmas[i] - wgmmas[i - 1] > apart]
    groups = [wgmmas[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(wgmmas)], strict=True)]
    whole, rest = divmod(config.l2_k_blocks, 4)
    assert sorted(map(len, groups)) == sorted([4 * 2] + [4 * 4] * (whole > 0) + [4 * rest] * (rest > 0))
    return groups
