"""The clustered GEMM of tests/emu/kernels/cluster.cpp: its source for a compiler, its operands and its result."""

from pathlib import Path

import torch

from deep_moe.jit.paths import include_dir
from deep_moe.jit.source import HeaderTree, Source

KB = 6  # blocks of 128 along K
K = KB * 128
SHARED_BYTES = 49152 + 1024
THREADS = 256
KERNELS = Path(__file__).parent / "emu" / "kernels"


def gpu_source() -> Source:
    """The translation unit for NVRTC or nvcc."""
    entry = (KERNELS / "cluster.cpp").read_text()
    entry = entry.replace('#include "common.h"', (KERNELS / "common.h").read_text().replace("#pragma once", ""))
    return HeaderTree(include_dir()).source("cluster.cu", entry, emulator=False)


class Operands:
    """A e4m3 [num_ctas * 64, K], B e4m3 [128, K], one scale fp32 for each block of K.

    blob: uint8, what the kernel gets: the scales as records of 128 bytes, A, B. exact: float64 [num_ctas * 64, 128].
    """

    def __init__(self, seed: int, num_ctas: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = self.rows = num_ctas * 64
        a, b = (torch.randn(n, K, generator=generator).to(torch.float8_e4m3fn) for n in (rows, 128))
        scales = torch.rand(KB, generator=generator) + 0.5
        records = scales[:, None].expand(KB, 32).contiguous()
        self.blob = torch.cat([x.view(torch.uint8).flatten() for x in (records, a, b)])
        self.exact = torch.zeros(rows, 128, dtype=torch.float64)
        for kb in range(KB):
            part = slice(kb * 128, kb * 128 + 128)
            self.exact += scales[kb].double() * (a[:, part].double() @ b[:, part].double().t())

    def maps(self, base: int, three_dimensions: bool) -> list[tuple[list[int], list[int], list[int], int]]:
        """(dims, strides in bytes, box, address) of the two tensor maps, for a blob at `base`."""
        a = base + KB * 128
        b = a + self.rows * K
        first = ([K, self.rows], [K], [128, 64], a)
        if three_dimensions:  # the two halves of B
            return [first, ([K, 64, 2], [K, 64 * K], [128, 64, 1], b)]
        return [first, ([K, 128], [K], [128, 64], b)]
