"""A tiny kernel tree and an instant compiler, for tests of the cache that are not about compiling."""

import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

from deep_moe.jit import build
from deep_moe.jit.compilers import Compiled
from deep_moe.jit.source import Source

PTXAS_LOG = (
    "ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info : Used 168 registers"
)


class FakeConfig:
    """Stands for a `_C.Config`: all that the JIT asks of it is its literal."""

    def __init__(self, hidden: int = 512) -> None:
        self.hidden = hidden

    def literal(self) -> str:
        return f"deep_moe::MegaMoeConfig{{.hidden = {self.hidden}}}"


class FakeCompiler:
    """ "Compiles" in `seconds` to a hash of the source; notes every run in `journal`."""

    identity = "fake 1.0"

    def __init__(self, journal: Path, seconds: float = 0.0) -> None:
        self.journal = journal
        self.seconds = seconds

    def flags(self, arch: str) -> list[str]:
        return [f"-arch={arch}"]

    def compile(self, source: Source, arch: str) -> Compiled:
        with open(self.journal, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return Compiled(hashlib.sha256(source.entry.encode()).digest() * 100, PTXAS_LOG)

    def runs(self) -> int:
        return len(self.journal.read_text().splitlines()) if self.journal.exists() else 0


def write_tree(root: Path) -> Path:
    """An include folder with the two kernel entry headers and two more."""
    texts = {
        "deep_moe/kernels/sm90_fp8.cuh": '#include "deep_moe/hw/hw.h"\n#include <deep_moe/base/common.h>\n',
        "deep_moe/kernels/stage.cuh": '#pragma once\n#include "deep_moe/hw/hw.h"\n',
        "deep_moe/hw/hw.h": '#if defined(DM_EMULATOR)\n#include "deep_moe/hw/emu.h"\n#else\n'
        '#  include "deep_moe/hw/cuda.h"  // PTX\n#endif\n',
        "deep_moe/hw/cuda.h": "// instructions\n",
        "deep_moe/hw/emu.h": "#include <cmath>\n",
        "deep_moe/base/common.h": "namespace deep_moe {}\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def in_processes(count: int, function, *arguments) -> list:
    """Results of `function(*arguments)` in `count` forked processes that start together."""
    context = multiprocessing.get_context("fork")
    queue, barrier = context.Queue(), context.Barrier(count)

    def body() -> None:
        barrier.wait()
        try:
            queue.put((function(*arguments), None))
        except BaseException as error:
            queue.put((None, repr(error)))

    processes = [context.Process(target=body) for _ in range(count)]
    for process in processes:
        process.start()
    outcomes = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    errors = [error for _, error in outcomes if error]
    assert not errors, errors
    return [result for result, _ in outcomes]


def kill_when(condition, function, *arguments) -> None:
    """Runs `function(*arguments)` in a forked process and kills it (SIGKILL) once `condition()` holds."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline and process.is_alive(), "the process did not come to the point"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def get(hidden: int = 512):
    return build.get_kernel(FakeConfig(hidden), "mega", "sm_90a")
