"""The real compilers, on a kernel of a few lines and on the real stage kernel."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from deep_moe import _C
from deep_moe.errors import JitError
from deep_moe.jit import build, compilers, get_kernel, report
from deep_moe.jit.report import complaints, parse_ptxas
from deep_moe.jit.source import Source

CLEAN = {"stack": 0, "spill_stores": 0, "spill_loads": 0, "warnings": []}
HEADERS = {"deep_moe/three.h": "#pragma once\nconstexpr int three() { return 3; }\n"}
KERNEL = """#include "deep_moe/three.h"
extern "C" __global__ void kernel(int* out) { *out = three(); }
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* p) {
    float a[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = a[i] * a[63 - i];
}
"""
# A wgmma whose accumulator is touched while it runs: ptxas serialises it and says C75xx.
SERIALISED = """
extern "C" __global__ void __launch_bounds__(128) kernel(float* p, unsigned long long d) {
    float a[4];
    for (int i = 0; i < 4; ++i) a[i] = p[i];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int n = 0; n < 4; ++n) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 1, 1;"
                     : "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3]) : "l"(d));
        a[0] += p[n];
    }
    asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) p[i] = a[i];
}
"""

GPU_COMPILERS = ["nvrtc", pytest.param("nvcc", marks=pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc"))]


@pytest.fixture(params=GPU_COMPILERS)
def compiler(request, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_JIT_COMPILER", request.param)
    return compilers.compiler_for("sm_90a")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "kernel cache"))
    return tmp_path / "kernel cache"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cubins_for_both_arches(compiler, arch):
    compiled = compiler.compile(Source("toy.cu", KERNEL, HEADERS), arch)
    assert compiled.binary[:4] == b"\x7fELF" and b"kernel" in compiled.binary
    found = parse_ptxas(compiled.log)
    assert found.pop("registers") > 0 and found == CLEAN and complaints(parse_ptxas(compiled.log)) == []


def test_errors_are_shown_whole(compiler):
    broken = KERNEL.replace("three()", "four()") + "int five = six;\n"
    with pytest.raises(JitError) as raised:
        compiler.compile(Source("toy.cu", broken, HEADERS), "sm_90a")
    text = str(raised.value)
    assert compiler.identity in text and "toy.cu(2)" in text and '"four"' in text and '"six"' in text


def test_spills_are_reported(compiler):
    log = compiler.compile(Source("spill.cu", SPILLING, {}), "sm_90a").log
    found = parse_ptxas(log)
    assert found["registers"] == 32 and found["spill_stores"] > 0 and found["spill_loads"] > 0 and found["stack"] > 0
    assert len(complaints(found)) == 3


def test_serialised_wgmma_is_reported(compiler):
    found = parse_ptxas(compiler.compile(Source("wgmma.cu", SERIALISED, {}), "sm_90a").log)
    assert any("C75" in line for line in found["warnings"]), found


def test_nothing_said_is_not_clean():
    assert len(complaints(parse_ptxas(""))) == 3


def test_unknown_compiler_is_named(monkeypatch):
    monkeypatch.setenv("DEEP_MOE_JIT_COMPILER", "clang")
    with pytest.raises(ValueError, match="DEEP_MOE_JIT_COMPILER is 'clang'; allowed: nvrtc, nvcc"):
        compilers.compiler_for("sm_90a")


def test_missing_compilers_say_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-g++")
    with pytest.raises(JitError, match="install g"):
        compilers.Gxx()
    for name in ("DEEP_MOE_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JitError, match="nvcc is not found"):
        compilers.Nvcc()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(JitError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
        compilers.load_nvrtc()


def test_the_emulator_library_of_a_toy(tmp_path):
    entry = '#include "deep_moe/three.h"\n#include <cstdint>\nextern "C" std::uint32_t answer() { return three(); }\n'
    library = tmp_path / "toy.so"
    library.write_bytes(compilers.Gxx().compile(Source("toy.cu", entry, HEADERS), "emulator").binary)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "3"


def test_the_real_stage_kernel_cold_and_from_the_cache(empty_cache):
    cold = get_kernel(_C.Config(), "stage", "sm_90a")
    assert cold.compiled and cold.path.is_relative_to(empty_cache)
    assert complaints(report(cold)) == [] and b"deep_moe_info" in cold.read()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert get_kernel(_C.Config(), "stage", "sm_90a").read() == cold.read()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.020


def test_compiling_needs_no_toolkit_no_driver_and_no_path(empty_cache):
    code = (
        "from deep_moe import _C, jit\n"
        "kernel = jit.get_kernel(_C.Config(num_topk=1), 'stage', 'sm_90a')\n"
        "assert kernel.compiled and kernel.meta['compiler'].startswith('nvrtc')\n"
    )
    keep = ("HOME", "PYTHONPATH", "DEEP_MOE_CACHE_DIR")
    environment = {name: os.environ[name] for name in keep if name in os.environ} | {"PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_header_edited_in_a_living_process_is_seen(tmp_path, monkeypatch, empty_cache):
    root = tmp_path / "include"
    shutil.copytree(build.include_dir(), root)
    monkeypatch.setattr(build, "include_dir", lambda: root)
    first = get_kernel(_C.Config(), "stage", "sm_90a")
    with open(root / "deep_moe/base/common.h", "a") as file:
        file.write("// a comment\n")
    second = get_kernel(_C.Config(), "stage", "sm_90a")
    assert second.compiled and second.key != first.key
