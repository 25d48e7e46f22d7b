"""Print versions, driver, GPUs, peer access and cache roots, and say what is missing and how to get it."""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from ..jit.cache import META, open_cache
from ..jit.compilers import Gxx, Nvcc, load_nvrtc, nvrtc_version
from ..jit.paths import include_dir
from ..version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has none."""


def run(_: argparse.Namespace) -> int:
    report = EnvReport()
    report.versions()
    report.compilers()
    report.gpus()
    report.cache()
    report.finish()
    return 0


class EnvReport:
    """Prints line by line; a probe that fails becomes a line under "missing" instead of an error."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def line(self, name: str, value: Any) -> None:
        print(f"{name:<16}{value}")

    def probe(self, name: str, function: Callable[[], Any], needed_for: str) -> Any:
        """Prints `function()`; where it raises, notes the reason and what `name` is needed for, and returns None."""
        try:
            value = function()
        except Exception as error:  # whatever is wrong with it, it cannot be used
            self.line(name, "-")
            self.missing.append(f"{name} (needed {needed_for}): {error or type(error).__name__}")
            return None
        self.line(name, value)
        return value

    def versions(self) -> None:
        self.line("deep_moe", f"{__version__} (headers: {include_dir()})")
        self.line("python", f"{platform.python_version()} ({sys.executable})")
        self.line("machine", f"{platform.machine()}, {os.cpu_count()} CPUs")
        self.probe("torch", lambda: importlib.metadata.version("torch"), "by everything but warmup")
        self.probe("deep_moe._C", lambda: _host_extension().__file__, "by everything; build it with `pip install -e .`")

    def compilers(self) -> None:
        self.probe("nvrtc", lambda: load_nvrtc() and nvrtc_version(), "to compile for GPUs")
        self.probe("g++", lambda: Gxx().identity, "by the emulator")
        try:
            self.line("nvcc", Nvcc().identity.removeprefix("nvcc "))
        except Exception:  # a second choice, so not "missing"
            self.line("nvcc", "- (optional)")

    def gpus(self) -> None:
        def version() -> str:
            driver = _host_extension().driver
            if driver.missing():
                raise RuntimeError(driver.missing())
            number = driver.version()
            return f"CUDA {number // 1000}.{number % 1000 // 10}"

        if self.probe("driver", version, "to run on GPUs") is None:
            return
        driver = _host_extension().driver
        count = driver.device_count()
        if not count:
            self.missing.append("GPU (needed to run on GPUs): the driver sees none")
        for index in range(count):
            self.line(f"gpu {index}", _describe_gpu(driver, index))
        for index in range(count if count > 1 else 0):
            peers = [str(peer) for peer in range(count) if peer != index and driver.can_access_peer(index, peer)]
            self.line(f"peers of {index}", " ".join(peers) or "none")

    def cache(self) -> None:
        cache = open_cache()
        if cache.writable is None:
            self.missing.append(
                "writable kernel cache (kernels are lost at exit): set DEEP_MOE_CACHE_DIR=/writable/folder"
            )
        for root in filter(None, (cache.writable, *cache.read_only)):
            mode = "writable" if root == cache.writable else "read-only"
            self.line("cache", f"{root} ({mode}, {len(list(root.glob(f'[!.]*/{META}')))} kernels)")
        for variable in sorted(os.environ):
            if variable.startswith("DEEP_MOE_") or variable in ("CXX", "CUDA_HOME", "CUDA_PATH"):
                self.line("variable", f"{variable}={os.environ[variable]}")

    def finish(self) -> None:
        print("\nmissing: " + ("nothing" if not self.missing else ""))
        for text in self.missing:
            print(f"  {text}")


def _host_extension():
    from .. import _C

    return _C


def _describe_gpu(driver: Any, index: int) -> str:
    attribute = driver.DeviceAttribute
    major, minor, sms = (
        driver.device_attribute(index, which)
        for which in (
            attribute.ComputeCapabilityMajor,
            attribute.ComputeCapabilityMinor,
            attribute.MultiprocessorCount,
        )
    )
    supported = "" if major == 9 else ", not supported: deep_moe has kernels for SM90 only"
    return f"{driver.device_name(index)} (SM{major}{minor}, {sms} SMs{supported})"
