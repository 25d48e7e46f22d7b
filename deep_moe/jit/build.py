"""From a configuration to a kernel: render, look up, compile, publish."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import JitError
from ..version import __version__
from .cache import Cache, Entry, open_cache, private_cache
from .compilers import Compiler, compiler_for
from .paths import include_dir
from .render import KernelRequest
from .report import parse_ptxas
from .source import HeaderTree, Source


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel in the cache.

    key: 32 hexadecimal digits. kind: "mega" or "stage". arch: "sm_90a" or "emulator". path: the cubin (GPU) or the
    shared library (emulator). meta: compiler, flags, report and checksum as stored beside it.
    compiled: by this very call, and not found in the cache.
    """

    key: str
    kind: str
    arch: str
    path: Path
    meta: dict = field(repr=False, compare=False)
    compiled: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """What the cache calls it."""
        return f"{self.kind}-{self.arch}-{self.key}"

    def read(self) -> bytes:
        """The binary."""
        return self.path.read_bytes()


@dataclass(frozen=True)
class _Job:
    """A rendered request: everything that its key depends on."""

    request: KernelRequest
    source: Source
    compiler: Compiler

    @classmethod
    def of(cls, request: KernelRequest, tree: HeaderTree) -> "_Job":
        source = tree.source(f"{request.kind}.cu", request.render(), emulator=request.arch == "emulator")
        return cls(request, source, compiler_for(request.arch))

    @functools.cached_property
    def key(self) -> str:
        arch = self.request.arch
        sha = self.source.digest()
        sha.update("\0".join([self.compiler.identity, *self.compiler.flags(arch), arch]).encode())
        return sha.hexdigest()[:32]

    @property
    def name(self) -> str:
        return f"{self.request.kind}-{self.request.arch}-{self.key}"

    @property
    def file(self) -> str:
        return "kernel.so" if self.request.arch == "emulator" else "kernel.cubin"

    def kernel(self, entry: Entry, compiled: bool) -> Kernel:
        return Kernel(self.key, self.request.kind, self.request.arch, entry.path, entry.meta, compiled)


def get_kernel(config: Any, kind: str, arch: str) -> Kernel:
    """The kernel `kind` ("mega" or "stage") of `config` (a `_C.Config`) for `arch` ("sm_90a" or "emulator").

    From the cache when it is there, else compiled. JitError when it cannot be (the compiler's whole log), or may not be
    (`DEEP_MOE_JIT=forbid`, with the key); ValueError for an unknown kind or arch.
    """
    return get_kernels([(config, kind, arch)])[0]


def get_kernels(
    requests: Iterable[KernelRequest | tuple[Any, str, str]],
    num_threads: int | None = None,
    progress: Callable[[Kernel], None] | None = None,
) -> list[Kernel]:
    """The kernels of several (config, kind, arch) requests, in their order, compiled in parallel threads.

    num_threads: default one per CPU. progress: called in this thread with each distinct kernel as it gets ready.
    Raises the first error after the compilations in flight have ended.
    """
    tree = HeaderTree(include_dir())
    jobs = [_Job.of(item if isinstance(item, KernelRequest) else KernelRequest(*item), tree) for item in requests]
    cache = open_cache()
    kernels: dict[str, Kernel] = {}
    for kernel in _found_then_compiled(cache, {job.name: job for job in jobs}, num_threads or os.cpu_count() or 1):
        kernels[kernel.name] = kernel
        if progress:
            progress(kernel)
    return [kernels[job.name] for job in jobs]


def report(kernel: Kernel) -> dict:
    """What the compiler said of `kernel`: registers, stack, spill_stores, spill_loads (bytes per thread), warnings."""
    return dict(kernel.meta["report"])


def _found_then_compiled(cache: Cache, jobs: dict[str, _Job], num_threads: int) -> Iterator[Kernel]:
    """The kernels in the order in which they get ready."""
    missing = []
    for name, job in jobs.items():
        entry = cache.find(name)
        if entry is None:
            missing.append(job)
        else:
            yield job.kernel(entry, compiled=False)
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(_compile, cache, job) for job in missing]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _compile(cache: Cache, job: _Job) -> Kernel:
    _refuse_if_forbidden(cache, job.name)
    if cache.writable is None:
        return _compile_into(private_cache(cache, "no root is writable"), job)
    try:
        return _compile_into(cache, job)
    except OSError as error:  # the disk is full, or the root went away
        return _compile_into(private_cache(cache, str(error)), job)


def _compile_into(cache: Cache, job: _Job) -> Kernel:
    with cache.lock(job.name):
        entry = cache.find(job.name)  # another process may have built it while we waited
        if entry is not None:
            return job.kernel(entry, compiled=False)
        start = time.perf_counter()
        binary, log = job.compiler.compile(job.source, job.request.arch)
        meta = {
            "name": job.name,
            "deep_moe": __version__,
            "compiler": job.compiler.identity,
            "flags": job.compiler.flags(job.request.arch),
            "compile_seconds": round(time.perf_counter() - start, 3),
            "report": parse_ptxas(log),
        }
        return job.kernel(cache.publish(job.name, job.file, binary, job.source.entry, meta), compiled=True)


def _refuse_if_forbidden(cache: Cache, name: str) -> None:
    mode = os.environ.get("DEEP_MOE_JIT") or "allow"
    if mode not in ("allow", "forbid"):
        raise ValueError(f"DEEP_MOE_JIT is {mode!r}; allowed: allow, forbid")
    if mode == "forbid":
        roots = [str(root) for root in (cache.writable, *cache.read_only) if root]
        raise JitError(
            f"kernel {name} is not in the cache ({', '.join(roots) or 'no root'}) and DEEP_MOE_JIT=forbid does not let "
            "it be compiled; fill the cache with `python -m deep_moe warmup` of the same deep_moe and compiler versions"
        )
