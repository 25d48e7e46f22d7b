"""Measures the ceilings of this machine: HBM read bandwidth, dense FP8 throughput and, between ranks, NVLink.

python bench/roofline.py        or        torchrun --nproc-per-node 2 bench/roofline.py
"""

import ctypes

import torch
import torch.distributed as dist
from cuda.bindings import driver, nvrtc
from shapes import Ceilings
from timing import Ranks

READ_BYTES = 8 << 30
READ_KERNEL = rb"""
extern "C" __global__ void __launch_bounds__(512)
read_all(const uint4* data, unsigned long long count, unsigned* sink) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned seen = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = __ldcs(data + i), b = __ldcs(data + i + stride);
        const uint4 c = __ldcs(data + i + 2 * stride), d = __ldcs(data + i + 3 * stride);
        seen ^= a.x ^ b.y ^ c.z ^ d.w;
    }
    if (seen == 0x12345678) *sink = seen;  // never: keeps the loads alive
}
"""


def _ok(result):
    """Unpack what cuda.bindings returns, or raise."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{type(status).__name__} {status.name}")
    return values[0] if values else None


def _read_kernel():
    program = _ok(nvrtc.nvrtcCreateProgram(READ_KERNEL, b"read.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    _ok(nvrtc.nvrtcCompileProgram(program, 1, [f"-arch=sm_{major}{minor}".encode()]))
    cubin = bytes(_ok(nvrtc.nvrtcGetCUBINSize(program)))
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = _ok(driver.cuModuleLoadData(cubin))
    return _ok(driver.cuModuleGetFunction(module, b"read_all"))


def best_us(call, repeats: int = 10) -> float:
    """Shortest of several calls, in µs, by CUDA events."""
    times = []
    for _ in range(repeats + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return min(times[2:])


def read_gbs() -> float:
    """HBM read bandwidth, two blocks of 512 threads per SM over 8 GB."""
    data = torch.zeros(READ_BYTES, dtype=torch.uint8, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = _read_kernel()
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    stream = torch.cuda.current_stream().cuda_stream
    values = (data.data_ptr(), READ_BYTES // 16, sink.data_ptr())
    kinds = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)

    def call():
        _ok(driver.cuLaunchKernel(kernel, blocks, 1, 1, 512, 1, 1, 0, stream, (values, kinds), 0))

    return READ_BYTES / best_us(call) / 1e3


def fp8_tflops(size: int = 8192) -> float:
    """Dense e4m3 product through cuBLAS, fast accumulation: the higher of its two modes."""
    a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn).T
    one = torch.ones((), device="cuda")

    def call():
        torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * size**3 / best_us(call) / 1e6


def nvlink_gbs(ranks: Ranks, size: int = 256 << 20) -> float:
    """One direction: every rank reads its right-hand neighbour's memory at the same time; the slowest rank."""
    import torch.distributed._symmetric_memory as symm_mem

    local = symm_mem.empty(size, dtype=torch.uint8, device=ranks.device)
    handle = symm_mem.rendezvous(local, dist.group.WORLD)
    peer = handle.get_buffer((ranks.rank + 1) % ranks.size, (size,), torch.uint8)
    mine = torch.empty(size, dtype=torch.uint8, device=ranks.device)
    dist.barrier()
    slowest = ranks.max([best_us(lambda: mine.copy_(peer))])[0]
    dist.barrier()
    return size / slowest / 1e3


def measure(ranks: Ranks) -> Ceilings:
    """All ceilings; with several ranks the slowest rank's."""
    read, fp8 = (-v for v in ranks.max([-read_gbs(), -fp8_tflops()]))
    torch.cuda.empty_cache()
    return Ceilings(read, fp8, nvlink_gbs(ranks) if ranks.size > 1 else None)


def main() -> None:
    ranks = Ranks()
    if ranks.size > 1:
        ranks.connect()
    ceilings = measure(ranks)
    ranks.print(f"{torch.cuda.get_device_name()}, {ranks.size} rank(s)")
    ranks.print(f"HBM read   {ceilings.read_gbs:8.0f} GB/s")
    ranks.print(f"FP8 8192^3 {ceilings.fp8_tflops:8.0f} TFLOPS")
    if ceilings.nvlink_gbs:
        ranks.print(f"NVLink     {ceilings.nvlink_gbs:8.0f} GB/s one way, all ranks at once")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
