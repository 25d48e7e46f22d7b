"""The GPU half of the host code without a GPU: _C.driver and launch plans against a libcuda.so.1 that keeps a log."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PREAMBLE = """
import struct
from deep_moe import _C, errors

config = _C.Config(num_ranks=2, num_experts=4, num_topk=2, hidden=192, intermediate=80, max_tokens_per_rank=32)
info = tuple(_C.mega_kernel_info(config))

def kernel(info=info, image=None, name="mega_moe", device=1):
    return _C.driver.Kernel(device, image or struct.pack("<4Q", *info), name, info)

def arguments(**changes):
    right = dict(config=config, rank=1, peers=[0x100000, 0x200000], l1_weights=0x300000, l1_scales=0x400000,
                 l2_weights=0x500000, l2_scales=0x600000, host_status=0, timeout_ns=1, activation_clamp=1.0)
    return _C.MegaArguments(**{**right, **changes})

def plan(lane):
    return _C.LaunchPlan(kernel(), lane, arguments(), num_sms=66)
"""


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", HERE / "fake_cuda.cpp"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(fake_cuda, tmp_path):
    """Runs Python code in a process that finds the fake driver; returns the log's lines, without those of loading."""

    def run(code: str) -> list[str]:
        log = tmp_path / "log"
        env = {**os.environ, "LD_LIBRARY_PATH": str(fake_cuda), "FAKE_CUDA_LOG": str(log)}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        code = PREAMBLE + textwrap.dedent(code)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines() if log.exists() else []

    return run


def only(lines, *words):
    """The lines that start with one of the words."""
    return [line for line in lines if line.startswith(words)]


def test_device_queries(run):
    run("""
        driver = _C.driver
        assert driver.missing() is None and driver.version() == 13000 and driver.device_count() == 2
        assert driver.device_name(0) == "Fake GPU"
        assert driver.device_attribute(1, driver.DeviceAttribute.MultiprocessorCount) == 132
        assert not driver.can_access_peer(0, 1) and driver.context_exists(0)
        driver.enable_peer_access(0, 1)  # "already enabled" is fine
        assert driver.create_stream(0) == 0x901  # non-blocking
        try:
            driver.device_name(7)
            raise AssertionError
        except errors.DeviceError as error:
            assert str(error) == "cuDeviceGet failed: CUDA_ERROR_FAKE (made up)", error
    """)


def test_a_kernel_is_prepared_and_described(run):
    lines = run("""
        loaded = kernel()
        assert (loaded.device, loaded.threads, loaded.registers, loaded.local_bytes) == (1, 384, 168, 0)
        assert loaded.shared_bytes == _C.smem_bytes(config) and loaded.blocks_per_sm == 1
        print(loaded.shared_bytes)
    """)
    assert lines[0] == "function mega_moe"
    assert lines[1].startswith("set attribute 8 ")


@pytest.mark.parametrize("word, what", enumerate(["layout hash", "shared memory bytes", "threads", "kernel kind"]))
def test_a_kernel_for_another_layout_is_refused(run, word, what):
    run(f"""
        wrong = list(info)
        wrong[{word}] += 1
        try:
            kernel(image=struct.pack("<4Q", *wrong))
            raise AssertionError
        except errors.DeviceError as error:
            assert "built for another" in str(error) and "{what}" in str(error), error
            assert str(wrong[{word}]) in str(error) and str(info[{word}]) in str(error)
    """)


def test_a_mega_launch(run):
    lines = run("""
        lane = _C.LaunchLane(1, 0, 0, 66)
        plan(lane).run(0xa1, 0x700000, 384, 5, 0)
    """)
    launch = only(lines, "launch")
    assert len(launch) == 1 and not only(lines, "wait", "record")
    # in the context of device 1, though none was current; may overlap the kernel before it; the first word of the
    # parameters is peers[0]
    assert launch[0].startswith("launch context 101 grid 66,1,1 block 384,1,1 shared ")
    assert launch[0].endswith("stream a1 attributes 1 first 100000")
    maps = only(lines, "map")
    assert len(maps) == 5
    for line in maps:  # uint8, no interleave, 128-byte swizzle, 256-byte promotion, zero fill
        assert line.startswith("map aligned 1 type 0 ") and line.endswith("element 1,1,1 modes 0,3,3,0")
        assert "rank 2 address 2" in line  # in the rank's buffer
    for line, rows in zip(maps[:2], (64, 8), strict=True):  # a block, and a box of its rows
        assert f"dims 192,1024,0 strides 192,0 box 128,{rows},0" in line
    for line, rows in zip(maps[2:4], (64, 8), strict=True):
        assert f"dims 128,1024,0 strides 128,0 box 128,{rows},0" in line
    assert "dims 192,32,0 strides 192,0 box 128,1,0" in maps[4]  # a staged token


def test_wrong_plans_are_refused(run):
    run("""
        for wrong in (dict(rank=2), dict(peers=[1]), dict(config=config.replace(hidden=100)),
                      dict(l1_biases=1), dict(config=config.replace(bias=True), l1_biases=1)):
            try:
                _C.LaunchPlan(kernel(), _C.LaunchLane(1, 0, 0, 66), arguments(**wrong), num_sms=66)
                raise AssertionError
            except ValueError as error:
                assert any(word in str(error) for word in ("rank", "hidden", "biases")), error
    """)


@pytest.mark.parametrize("tokens, grid", [(0, 1), (1, 1), (9, 9), (8 * 132, 8 * 132), (1 << 20, 8 * 132)])
def test_a_stage_launch(run, tokens, grid):
    lines = run(f"""
        loaded = kernel(tuple(_C.stage_kernel_info(config)), name="stage")
        call = _C.StageCall(0x1000, 384, 0, 0, 0x2000, 8, False, 0x3000, 8, 0, {tokens}, 1.0)
        _C.StagePlan(loaded, 0x100000, 132).run(0xa1, call)
    """)
    (launch,) = only(lines, "launch")
    assert f"grid {grid},1,1 block 256,1,1 shared 0 stream a1" in launch and launch.endswith("first 100000")


# The order of launches of one device


def test_one_stream_adds_nothing(run):
    lines = run("""
        lane = _C.LaunchLane(1, 0, 0, 132)
        one = plan(lane)
        for _ in range(3):
            one.run(0xa1, 0, 0, 0, 0)
    """)
    assert len(only(lines, "launch")) == 3 and not only(lines, "wait", "record")


def test_a_second_stream_waits_for_the_first(run):
    lines = run("""
        one = plan(_C.LaunchLane(1, 0, 0, 132))
        for stream in (0xa1, 0xa2, 0xa2, 0xa1):
            one.run(stream, 0, 0, 0, 0)
    """)
    steps = only(lines, "launch", "wait", "record")
    assert [(line.split()[0], line.split("stream ")[1].split()[0]) for line in steps] == [
        ("launch", "a1"),
        ("record", "a1"),
        ("wait", "a2"),
        ("launch", "a2"),
        ("launch", "a2"),
        ("record", "a2"),
        ("wait", "a1"),
        ("launch", "a1"),
    ]


def test_buffers_that_do_not_fit_beside_each_other_wait(run):
    lines = run("""
        first, second = plan(_C.LaunchLane(1, 0, 0, 132)), plan(_C.LaunchLane(1, 0, 0, 132))
        first.run(0xa1, 0, 0, 0, 0)
        second.run(0xa2, 0, 0, 0, 0)
        second.run(0xa2, 0, 0, 0, 0)  # is behind the first already
    """)
    steps = [line.split()[0] for line in only(lines, "launch", "wait", "record")]
    assert steps == ["launch", "record", "wait", "launch", "record", "launch", "record"]
    assert all(" attributes 0 " in line for line in only(lines, "launch"))  # none overlaps what is in front of it
    waited, recorded = only(lines, "wait")[0], only(lines, "record")[0]
    assert waited.split()[1:3] == ["stream", "a2"] and waited.split()[-1] == recorded.split()[2]


@pytest.mark.parametrize(
    "lanes",
    [
        "_C.LaunchLane(1, 0, 0, 66), _C.LaunchLane(1, 0, 0, 66)",  # disjoint budgets
        "_C.LaunchLane(1, 7, 0, 132), _C.LaunchLane(1, 7, 1, 132)",  # ranks of one LocalGroup
        "_C.LaunchLane(0, 0, 0, 132), _C.LaunchLane(1, 0, 0, 132)",  # two devices
    ],
)
def test_launches_that_may_run_together_do(run, lanes):
    lines = run(f"""
        first, second = (plan(lane) for lane in ({lanes}))
        first.run(0xa1, 0, 0, 0, 0)
        second.run(0xa2, 0, 0, 0, 0)
    """)
    assert len(only(lines, "launch")) == 2 and not only(lines, "wait")


def test_two_buffers_of_one_local_rank_share_its_lane(run):
    lines = run("""
        first, second = plan(_C.LaunchLane(1, 7, 0, 16)), plan(_C.LaunchLane(1, 7, 0, 16))
        first.run(0xa1, 0, 0, 0, 0)
        second.run(0xa2, 0, 0, 0, 0)
    """)
    assert len(only(lines, "wait")) == 1


def test_captures_wait_for_nothing_outside_and_leave_the_order_alone(run):
    lines = run("""
        one = plan(_C.LaunchLane(1, 0, 0, 132))
        for stream in (0xa1, 0xc01, 0xa1):  # eager, captured on a side stream, eager
            one.run(stream, 0, 0, 0, 0)
    """)
    assert not only(lines, "wait", "record")


def test_a_fork_inside_a_capture_is_chained(run):
    lines = run("""
        one = plan(_C.LaunchLane(1, 0, 0, 132))
        for stream in (0xc01, 0xc02, 0xd01):  # two streams of one capture, then another capture
            one.run(stream, 0, 0, 0, 0)
    """)
    assert [line.split()[0] for line in only(lines, "launch", "wait", "record")] == [
        "launch",
        "record",
        "wait",
        "launch",
        "launch",
    ]
    assert only(lines, "wait")[0].startswith("wait stream c02")
