"""Rendering, header walk, and what a key depends on."""

import dataclasses
import shutil

import pytest
from jit_fakes import FakeCompiler, FakeConfig, write_tree

from deep_moe import _C
from deep_moe.errors import JitError
from deep_moe.jit import KernelRequest, build
from deep_moe.jit.paths import include_dir
from deep_moe.jit.render import ARCHES, ENTRIES
from deep_moe.jit.source import HeaderTree, includes_of

MEGA = KernelRequest(FakeConfig(), "mega", "sm_90a")


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "include")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    fake = FakeCompiler(tmp_path / "journal")
    monkeypatch.setattr(build, "compiler_for", lambda arch: fake)
    return fake


def key_of(root, request=MEGA) -> str:
    return build._Job.of(request, HeaderTree(root)).key


def headers_of(root, request) -> set[str]:
    return set(build._Job.of(request, HeaderTree(root)).source.headers)


def test_rendered_text():
    assert KernelRequest(_C.Config(hidden=768, num_topk=3), "mega", "sm_90a").render() == (
        '#include "deep_moe/kernels/sm90_fp8.cuh"\n'
        "DM_DEFINE_MEGA_KERNEL((deep_moe::MegaMoeConfig{.num_ranks = 1, .num_experts = 8, .num_topk = 3, "
        ".hidden = 768, .intermediate = 256, .max_tokens_per_rank = 64, .ring_rows = 1024, .decoded_slots = 0, "
        ".mma_type = deep_moe::MmaType::Fp8xFp8, "
        ".activation = deep_moe::Activation::SwiGLU, .bias = false, .bound_class = 0, .block_m = 64, .lag_blocks = 4, "
        ".unit_blocks = 4, .decode_ahead = false, .trace_events = 0}))\n"
    )


def test_variants_of_a_buffer_share_the_stage_kernel():
    small = _C.Config(block_m=64, lag_blocks=2)
    large = small.replace(block_m=128, lag_blocks=1, unit_blocks=2, bound_class=1, trace_events=9)
    assert KernelRequest(small, "stage", "sm_90a").render() == KernelRequest(large, "stage", "sm_90a").render()
    assert KernelRequest(small, "mega", "sm_90a").render() != KernelRequest(large, "mega", "sm_90a").render()


def test_the_configuration_holds_nothing_that_changes_per_call():
    fields = set(_C.Config().as_dict())
    assert fields == {
        *(
            "num_ranks",
            "num_experts",
            "num_topk",
            "hidden",
            "intermediate",
            "max_tokens_per_rank",
            "ring_rows",
            "decoded_slots",
        ),
        *("mma_type", "activation", "bias", "bound_class", "block_m", "lag_blocks", "unit_blocks"),
        *("decode_ahead", "trace_events"),
    }, "a new field is a new set of kernels: it must be equal on all ranks and never a count, pointer, stream or rank"


@pytest.mark.parametrize("kind, arch", [("mega", "sm_80"), ("gemm", "sm_90a")])
def test_unknown_kinds_and_arches_are_named(kind, arch):
    with pytest.raises(ValueError, match="allowed: "):
        KernelRequest(FakeConfig(), kind, arch).render()


def test_an_arch_without_kernels_says_so():
    with pytest.raises(JitError, match="no mega kernel for sm_100a yet; this version has it for sm_90a"):
        KernelRequest(FakeConfig(), "mega", "sm_100a").render()


@pytest.mark.parametrize("arch", ["sm_90a", "emulator"])
@pytest.mark.parametrize("kind", ["mega", "stage"])
def test_mma_types_have_kernels_of_their_own(kind, arch):
    """From the same header. `stage` too, as it puts activations where the math warps expect them."""
    fp8, mxfp4 = _C.Config(mma_type=_C.MmaType.Fp8xFp8), _C.Config(mma_type=_C.MmaType.Fp8xMxfp4)
    text = KernelRequest(mxfp4, kind, arch).render()
    assert ".mma_type = deep_moe::MmaType::Fp8xMxfp4" in text
    assert text.replace("Fp8xMxfp4", "Fp8xFp8") == KernelRequest(fp8, kind, arch).render()


@pytest.mark.parametrize(
    "mma_type, tiles, threads",
    [(_C.MmaType.Fp8xFp8, (8, 64, 128), 384), (_C.MmaType.Fp8xMxfp4, (8, 16, 24, 32, 64), 640)],
)
def test_threads_of_a_kernel(mma_type, tiles, threads):
    """One warpgroup beside two that multiply, or four that decode as well; or one, two and one that decodes."""
    assert _C.Config(mma_type=_C.MmaType.Fp8xMxfp4, block_m=128).num_threads == 512
    for block_m in tiles:
        config = _C.Config(mma_type=mma_type, block_m=block_m)
        assert config.error() is None and config.num_threads == threads


def test_the_worlds_do_not_see_each_other(tree, compiler):
    emulated = dataclasses.replace(MEGA, arch="emulator")
    shared = {"deep_moe/kernels/sm90_fp8.cuh", "deep_moe/hw/hw.h", "deep_moe/base/common.h"}
    assert headers_of(tree, MEGA) == shared | {"deep_moe/hw/cuda.h"}
    assert headers_of(tree, emulated) == shared | {"deep_moe/hw/emu.h"}


def test_every_reached_header_is_in_the_key_and_no_other(tree, compiler):
    before = key_of(tree)
    reached = headers_of(tree, MEGA)
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        text = path.read_text()
        path.write_text(text + "// edited\n")
        changed = key_of(tree) != before
        assert changed == (str(path.relative_to(tree)) in reached), path
        path.write_text(text)
    assert key_of(tree) == before


def test_real_headers_are_all_in_the_key(tmp_path, compiler):
    root = tmp_path / "include"
    shutil.copytree(include_dir(), root)
    before, reached = key_of(root), headers_of(root, MEGA)
    assert "deep_moe/layout/config.h" in reached and not any("/emu/" in name for name in reached)
    for name in reached:
        text = (root / name).read_text()
        (root / name).write_text(text + "\n")
        assert key_of(root) != before, name
        (root / name).write_text(text)


def test_the_rest_of_the_key(tree, compiler, monkeypatch):
    keys = {key_of(tree), key_of(tree, KernelRequest(FakeConfig(640), "mega", "sm_90a"))}
    keys.add(key_of(tree, KernelRequest(FakeConfig(), "stage", "sm_90a")))
    monkeypatch.setattr(compiler, "identity", "fake 1.1")
    keys.add(key_of(tree))
    monkeypatch.setattr(compiler, "flags", lambda arch: ["-O1"])
    keys.add(key_of(tree))
    assert len(keys) == 5


def test_the_key_does_not_depend_on_where_the_headers_are(tree, compiler, tmp_path):
    moved = tmp_path / "moved away"
    shutil.copytree(tree, moved)
    assert key_of(moved) == key_of(tree)


@pytest.mark.parametrize(
    "line, message",
    [
        ("#include <cuda_fp8.h>", "sm90_fp8.cuh includes cuda_fp8.h, but"),
        ('#include "common.cuh"', "sm90_fp8.cuh includes common.cuh, but"),
        ('#include "deep_moe/absent.h"', "sm90_fp8.cuh includes deep_moe/absent.h: No such file"),
        ("#include HEADER", "#include HEADER: only"),
    ],
)
def test_foreign_includes_are_refused(tree, compiler, line, message):
    with open(tree / "deep_moe/kernels/sm90_fp8.cuh", "a") as file:
        file.write(line + "\n")
    with pytest.raises(JitError, match=message):
        key_of(tree)


@pytest.mark.parametrize("emulator", [False, True])
def test_conditions(emulator):
    text = """
#ifdef DM_EMULATOR
#include "deep_moe/a.h"
#  if !defined(DM_EMULATOR)
#include "deep_moe/never.h"
#  endif
#else
# include "deep_moe/b.h"  // why
#endif
#ifndef DM_EMULATOR
#include "deep_moe/c.h"
#endif
#if !defined DM_EMULATOR
#include "deep_moe/d.h"
#endif
#if __CUDA_ARCH__ >= 1000
#include <deep_moe/e.h>
#elif defined(DM_EMULATOR)
#include "deep_moe/f.h"
#else
#include "deep_moe/g.h"
#endif
// #include "deep_moe/comment.h"
"""
    names = "aefg" if emulator else "bcdefg"
    assert includes_of(text, emulator) == [(f"deep_moe/{name}.h", name == "e") for name in names]


def test_every_arch_is_known_to_the_table():
    assert set(ARCHES) == set(ENTRIES) == {"sm_90a", "sm_100a", "emulator"}
