"""Multicast, remote arrivals and sync_cluster on the GPU: the clustered GEMM that tests/emu runs on the emulator."""

import ctypes

import pair_gemm
import pytest
import torch

from deep_moe.jit.compilers import compiler_for

cu = pytest.importorskip("cuda.bindings.driver")
NUM_CTAS = 64
REPEATS = 200


def check(result):
    """The values of a driver call."""
    status, *values = result
    assert status == cu.CUresult.CUDA_SUCCESS, status
    return values[0] if values else None


@pytest.fixture
def function(needs_sm90):
    torch.zeros(1, device="cuda")  # makes the primary context current
    image = compiler_for("sm_90a").compile(pair_gemm.gpu_source(), "sm_90a").binary
    found = check(cu.cuModuleGetFunction(check(cu.cuModuleLoadData(image)), b"pair_gemm"))
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuFuncSetAttribute(found, attribute, pair_gemm.SHARED_BYTES))
    return found


def tensor_map(dims, strides, box, address) -> bytes:
    word, half = cu.cuuint64_t, cu.cuuint32_t
    made = check(
        cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(dims),
            address,
            [word(n) for n in dims],
            [word(n) for n in strides],
            [half(n) for n in box],
            [half(1)] * len(dims),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return b"".join(int(w).to_bytes(8, "little") for w in made.opaque)


def launch(function, arguments: list[bytes]) -> None:
    cluster = cu.CUlaunchAttributeValue()
    cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z = 2, 1, 1
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value = cluster
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = NUM_CTAS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = pair_gemm.THREADS, 1, 1
    config.sharedMemBytes = pair_gemm.SHARED_BYTES
    config.attrs, config.numAttrs = [attribute], 1
    buffers = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
    pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
    check(cu.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


@pytest.mark.parametrize("three_dimensions", [False, True])
def test_pairs_share_their_weights(function, three_dimensions):
    operands = pair_gemm.Operands(1, NUM_CTAS)
    blob = operands.blob.cuda()
    out = torch.full((NUM_CTAS * 64, 128), torch.nan, device="cuda")
    args = b"".join(ctypes.c_uint64(p) for p in [0] * 8 + [out.data_ptr(), blob.data_ptr()])
    args += b"".join(ctypes.c_uint32(v) for v in (0, 1, int(three_dimensions), pair_gemm.KB))
    maps = b"".join(tensor_map(*spec) for spec in operands.maps(blob.data_ptr(), three_dimensions))
    torch.cuda.synchronize()
    first = None
    for _ in range(REPEATS):
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        launch(function, [args, maps])
        torch.cuda.synchronize()
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
    error = (first.cpu().double() - operands.exact).norm() / operands.exact.norm()
    assert error < 1e-3
