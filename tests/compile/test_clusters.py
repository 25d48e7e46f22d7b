"""The cluster functions of hw/cuda compile for SM90 with both compilers, in a kernel that the emulator runs too."""

import shutil

import pair_gemm
import pytest

from deep_moe.jit.compilers import compiler_for
from deep_moe.jit.report import complaints, parse_ptxas

COMPILERS = ["nvrtc", pytest.param("nvcc", marks=pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc"))]


@pytest.mark.parametrize("name", COMPILERS)
def test_clean(name, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_JIT_COMPILER", name)
    compiled = compiler_for("sm_90a").compile(pair_gemm.gpu_source(), "sm_90a")
    assert complaints(parse_ptxas(compiled.log)) == []
    assert b"pair_gemm" in compiled.binary
