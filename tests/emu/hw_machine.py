"""Builds the small kernels in tests/emu/kernels and runs them on emulated ranks."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import subprocess
import tempfile
import threading

import torch

from deep_moe import _C

HERE = pathlib.Path(__file__).parent
INCLUDE = HERE.parent.parent / "include"
RANK_BYTES = 256 * 1024


@functools.cache
def kernel(source: str, function: str) -> int:
    """Address of `function` in tests/emu/kernels/<source>.cpp, compiled for the emulator."""
    folder = tempfile.mkdtemp(prefix="deep_moe_hw_")
    binary = pathlib.Path(folder) / f"{source}.so"
    command = ["g++", "-DDM_EMULATOR", "-std=c++20", "-O2", "-fPIC", "-shared", f"-I{INCLUDE}"]
    subprocess.run([*command, str(HERE / "kernels" / f"{source}.cpp"), "-o", str(binary)], check=True)
    return _C.emu.load_function(str(binary), function)


class Machine:
    """A world whose ranks have RANK_BYTES of memory each, zeroed, and an output tensor each."""

    def __init__(self, num_ranks: int, out_bytes: int):
        self.world = _C.emu.World(num_ranks)
        self.num_ranks = num_ranks
        self.memory = [self.world.allocate(r, RANK_BYTES, "memory") for r in range(num_ranks)]
        for base in self.memory:
            ctypes.memset(base, 0, RANK_BYTES)
        self.outs = [torch.full((out_bytes,), 0x7F, dtype=torch.uint8) for _ in range(num_ranks)]
        self.weights = torch.zeros(1, dtype=torch.uint8)
        self.fields: list[tuple[str, int, int]] = []
        self.region_bytes = RANK_BYTES

    def bytes_of(self, rank: int) -> torch.Tensor:
        """uint8 view of a rank's memory."""
        return torch.frombuffer((ctypes.c_ubyte * RANK_BYTES).from_address(self.memory[rank]), dtype=torch.uint8)

    def args(self, rank: int, plant: int, count: int) -> bytes:
        pointers = self.memory + [0] * (8 - self.num_ranks) + [self.outs[rank].data_ptr(), self.weights.data_ptr()]
        packed = b"".join(ctypes.c_uint64(p) for p in pointers)
        return packed + b"".join(ctypes.c_uint32(v) for v in (rank, self.num_ranks, plant, count))

    def launch(
        self, rank, source, function, *, plant=0, count=0, maps=(), sms=2, cluster=1, threads=64, smem=0, options=None
    ):
        """One launch of one rank; returns its counts."""
        regions = [("memory", base, self.region_bytes, True, r) for r, base in enumerate(self.memory)]
        regions.append(("out", self.outs[rank].data_ptr(), self.outs[rank].numel(), True, -1))
        weights = self.weights
        regions.append(("weights", weights.data_ptr(), weights.numel() * weights.element_size(), False, -1))
        arguments = [self.args(rank, plant, count)]
        if maps:
            arguments.append(b"".join(maps))
        return self.world.launch(
            rank=rank,
            name=function,
            entry=kernel(source, function),
            num_sms=sms,
            threads=threads,
            smem_bytes=smem,
            args=arguments,
            regions=regions,
            smem_fields=self.fields,
            options=options or _C.emu.Options(),
            cluster_size=cluster,
        )

    def each_rank(self, body):
        """body(rank) in one thread per rank; the first error is raised after all have ended."""
        errors: list[Exception | None] = [None] * self.num_ranks

        def run(rank: int) -> None:
            try:
                body(rank)
            except Exception as error:  # noqa: BLE001 - handed to the caller below
                errors[rank] = error
            self.world.rank_ended(rank, str(errors[rank] or "returned"))

        for r in range(self.num_ranks):
            self.world.rank_started(r)
        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error


def options(seed: int, **more) -> object:
    return _C.emu.Options(seed=seed, **more)
