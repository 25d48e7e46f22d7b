"""The compilers: NVRTC (default) and nvcc for GPUs, g++ for the emulator.

A compiler is a small object with
    identity            its name and full version, part of the key
    flags(arch)         command-line flags, part of the key
    compile(source, arch) -> Compiled     binary and log; JitError with the whole log when the source is wrong
None of them needs a GPU, a driver or CUDA_HOME; only nvcc needs a CUDA toolkit.
"""

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import JitError
from .source import Source


class Compiled(NamedTuple):
    """A cubin or a shared library, and what the compiler printed."""

    binary: bytes
    log: str


class Compiler(Protocol):
    identity: str

    def flags(self, arch: str) -> list[str]: ...

    def compile(self, source: Source, arch: str) -> Compiled: ...


def compiler_for(arch: str) -> Compiler:
    """g++ for the emulator; for GPUs what DEEP_MOE_JIT_COMPILER names: "nvrtc" (default) or "nvcc"."""
    if arch == "emulator":
        return Gxx()
    name = os.environ.get("DEEP_MOE_JIT_COMPILER") or "nvrtc"
    compilers = {"nvrtc": Nvrtc, "nvcc": Nvcc}
    if name not in compilers:
        raise ValueError(f"DEEP_MOE_JIT_COMPILER is {name!r}; allowed: {', '.join(compilers)}")
    return compilers[name]()


class Nvrtc:
    """NVRTC of the `nvidia-cuda-nvrtc` wheel (or of a toolkit that cuda-pathfinder finds), headers given in memory."""

    def __init__(self) -> None:
        self.identity = f"nvrtc {nvrtc_version()}"

    def flags(self, arch: str) -> list[str]:
        return ["-std=c++20", "-default-device", f"-arch={arch}", "--ptxas-options=-v"]

    def compile(self, source: Source, arch: str) -> Compiled:
        nvrtc = load_nvrtc()
        names, texts = ([s.encode() for s in column] for column in (source.headers, source.headers.values()))
        entry, name = source.entry.encode(), source.name.encode()
        program = _nvrtc_call(nvrtc.nvrtcCreateProgram, entry, name, len(names), texts, names)
        try:
            flags = [flag.encode() for flag in self.flags(arch)]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            log = _nvrtc_bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            log = log.rstrip(b"\0 \n").decode(errors="replace")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise JitError(f"{self.identity} cannot compile {source.name} ({status.name}):\n{log}")
            return Compiled(_nvrtc_bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def load_nvrtc():
    """The `cuda.bindings.nvrtc` module with its library loaded; JitError that says what to install."""
    try:
        from cuda.bindings import nvrtc

        loaded = "{}.{}".format(*_nvrtc_call(nvrtc.nvrtcVersion))
    except JitError:
        raise
    except Exception as error:  # the bindings raise several types when the library is missing
        raise JitError(
            f"NVRTC cannot be loaded ({error}); install it with `pip install cuda-bindings nvidia-cuda-nvrtc`, "
            "or use a toolkit's nvcc with DEEP_MOE_JIT_COMPILER=nvcc"
        ) from error
    wheel = _nvrtc_wheel_version()
    if wheel and not wheel.startswith(loaded + "."):
        raise JitError(
            f"NVRTC {loaded} is loaded although the wheel of version {wheel} is installed: another library's libnvrtc "
            "came first in this process. Compile before importing that library, or install a matching nvidia-cuda-nvrtc"
        )
    return nvrtc


@functools.lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Full version, e.g. "13.0.88". From the wheel's metadata where there is one: a cache hit loads no compiler."""
    version = _nvrtc_wheel_version()
    if version:
        return version
    nvrtc = load_nvrtc()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    # A toolkit's library is a link to libnvrtc.so.13.0.88.
    library = os.path.realpath(load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    match = re.search(r"\.so\.(\d+\.\d+\.\d+)$", library)
    return match[1] if match else "{}.{}".format(*_nvrtc_call(nvrtc.nvrtcVersion))


@functools.lru_cache(maxsize=1)
def _nvrtc_wheel_version() -> str | None:
    """Version of the NVRTC wheel that matches the installed cuda-bindings, or None."""
    try:
        major = int(importlib.metadata.version("cuda-bindings").split(".")[0])
        return importlib.metadata.version("nvidia-cuda-nvrtc" + ("" if major >= 13 else f"-cu{major}"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc_call(function, *args):
    """Result of an NVRTC function; JitError when it reports a failure."""
    status, *values = function(*args)
    if status.value != 0:
        raise JitError(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else values


def _nvrtc_bytes(size_of, read, program) -> bytes:
    data = bytes(_nvrtc_call(size_of, program))
    _nvrtc_call(read, program, data)  # the bindings write into the bytes object
    return data


class _CommandLineCompiler:
    """Runs a compiler in a private folder that holds copies of the entry and its headers, under relative names only:
    no path of this machine reaches the binary, and spaces in paths do not matter."""

    identity: str
    command: list[str]
    source_suffix: str

    def flags(self, arch: str) -> list[str]:
        raise NotImplementedError

    def compile(self, source: Source, arch: str) -> Compiled:
        with tempfile.TemporaryDirectory(prefix="deep_moe-jit-") as folder:
            root = Path(folder)
            for name, text in source.headers.items():
                path = root / "include" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            name = Path(source.name).stem + self.source_suffix
            (root / name).write_text(source.entry, encoding="utf-8")
            command = [*self.command, *self.flags(arch), "-Iinclude", name, "-o", "kernel.out"]
            done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            log = done.stdout.decode(errors="replace").rstrip()
            if done.returncode != 0:
                raise JitError(f"{self.identity} cannot compile {source.name} (exit status {done.returncode}):\n{log}")
            return Compiled((root / "kernel.out").read_bytes(), log)


class Nvcc(_CommandLineCompiler):
    """A toolkit's nvcc: DEEP_MOE_NVCC, else $CUDA_HOME/bin/nvcc, else the one on PATH."""

    source_suffix = ".cu"

    def __init__(self) -> None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        beside = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
        nvcc = os.environ.get("DEEP_MOE_NVCC") or beside or shutil.which("nvcc")
        if not nvcc:
            raise JitError("nvcc is not found; add it to PATH or set CUDA_HOME, or unset DEEP_MOE_JIT_COMPILER")
        self.command = [nvcc]
        self.identity = _identity("nvcc", (nvcc, "--version"), r"\bV(\d+\.\d+\.\d+)")

    def flags(self, arch: str) -> list[str]:
        code = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
        return ["-std=c++20", "--expt-relaxed-constexpr", code, "-O3", "-Xptxas=-v", "-cubin"]


class Gxx(_CommandLineCompiler):
    """The emulator's C++ compiler: $CXX, else g++. No -march=native, so that a cache can move between machines."""

    source_suffix = ".cpp"
    optimisation = "-O2"  # tests that run each build once lower it

    def __init__(self) -> None:
        self.command = shlex.split(os.environ.get("CXX") or "g++")
        if not shutil.which(self.command[0]):
            raise JitError(
                f"the emulator compiles its kernels with {self.command[0]}, which is not found; "
                "install g++ (Debian: apt install g++) or set CXX"
            )
        self.identity = _identity(platform.machine(), (*self.command, "--version"), r"^(.+)$")

    def flags(self, arch: str) -> list[str]:
        return ["-std=c++20", self.optimisation, "-fPIC", "-shared", "-DDM_EMULATOR"]


@functools.lru_cache(maxsize=8)
def _identity(name: str, command: tuple[str, ...], pattern: str) -> str:
    """`name` and the version that `command` prints (the first group of `pattern`)."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True)
    match = re.search(pattern, done.stdout, re.M)
    if done.returncode != 0 or not match:
        raise JitError(f"`{shlex.join(command)}` does not tell its version:\n{done.stdout}")
    return f"{name} {match[1]}"
