"""Builds deep_moe._C: g++, pybind11 and ninja; no CUDA toolkit, no torch headers, no link to libcuda.

Works without network as `python3 setup.py build_ext --inplace`, and as `pip install [-e] .`. Metadata: pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".S"))
CXX_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
LINK_FLAGS = ["-shared", "-pthread", "-ldl"]

# Plain depfiles, not `deps = gcc`: ninja's binary log of them does not survive two builds at once.
NINJA_RULES = """\
cxx = {cxx}
flags = {flags}
rule compile
  command = $cxx $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  description = compile $in
rule link
  command = $cxx $in -o $out {link_flags}
  description = link $out
"""


def ninja_command() -> list[str]:
    """The ninja executable on PATH, else the one of the Python package."""
    found = shutil.which("ninja")
    if found:
        return [found]
    return [sys.executable, "-m", "ninja"]


def ninja_path(path: str | Path) -> str:
    """A path as it must be written in a ninja file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class NinjaBuildExt(build_ext):
    """Compiles each source to an object with header dependencies, so that a rebuild touches only what changed."""

    def build_extension(self, ext: Extension) -> None:
        build_dir = Path(self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        includes = [ROOT / "include", ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
        flags = " ".join(CXX_FLAGS + [f"-I'{path}'" for path in includes])
        lines = [NINJA_RULES.format(cxx=os.environ.get("CXX", "g++"), flags=flags, link_flags=" ".join(LINK_FLAGS))]
        objects = []
        for source in ext.sources:
            objects.append(ninja_path(build_dir / (source + ".o")))
            lines.append(f"build {objects[-1]}: compile {ninja_path(ROOT / source)}")
        lines.append(f"build {ninja_path(output)}: link {' '.join(objects)}\n")
        (build_dir / "build.ninja").write_text("\n".join(lines))
        jobs = [f"-j{self.parallel}"] if self.parallel else []
        subprocess.run([*ninja_command(), "-C", str(build_dir), *jobs], check=True)


class BuildPyWithHeaders(build_py):
    """Puts the device headers (and the presets) inside the installed package, where the JIT looks for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, pattern in (("include", "*"), ("jit_cache", "presets.json")):
            for source in (ROOT / folder).rglob(pattern):
                if source.is_file():
                    target = Path(self.build_lib) / "deep_moe" / source.relative_to(ROOT)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)


setup(
    ext_modules=[Extension("deep_moe._C", SOURCES)],
    cmdclass={"build_ext": NinjaBuildExt, "build_py": BuildPyWithHeaders},
)
