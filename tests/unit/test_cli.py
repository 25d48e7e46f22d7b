"""The command line without a GPU."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest

from deep_moe import cli, jit
from deep_moe.cli import env, presets, warmup
from deep_moe.cli.progress import ProgressBar


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_presets_are_problems_that_fit_one_and_eight_ranks():
    loaded = presets.load_presets()
    names = [preset.name for preset in loaded.models]
    assert len(names) == 18 and len(set(names)) == 18 and not set(names) & set(loaded.refused)
    for preset in loaded.models:
        for ranks in (1, 8):
            assert preset.problem(8192).configs(ranks)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("deepseek-v3", (7168, 2048, 256, 8, None)),
        ("DeepSeek-R1", (7168, 2048, 256, 8, None)),
        ("deepseek-v4-flash", (4096, 2048, 256, 6, 10.0)),
        ("deepseek-v4.1-flash", (5120, 2304, 384, 6, 10.0)),
        ("qwen3-next-80b", (2048, 512, 512, 10, None)),
    ],
)
def test_preset_shapes(name, shape):
    p = presets.load_presets().find(name).problem(64)
    assert (p.hidden, p.intermediate, p.num_experts, p.num_topk, p.activation_clamp) == shape


@pytest.mark.parametrize("name, experts", [("gpt-oss-20b", 32), ("gpt-oss-120b", 128)])
def test_gpt_oss_brings_its_activation_and_its_biases(name, experts):
    p = presets.load_presets().find(name).problem(64)
    assert (p.hidden, p.intermediate, p.num_experts, p.num_topk) == (2880, 2880, experts, 4)
    assert (p.mma_type, p.bias) == ("fp8xmxfp4", True)
    assert (p.activation, p.activation_clamp, p.activation_alpha) == ("swigluoai", 7.0, 1.702)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_two_presets_of_a_model_differ_in_the_weights_only(name):
    loaded = presets.load_presets()
    fp8, mxfp4 = loaded.find(name).problem(64), loaded.find(f"{name}-mxfp4").problem(64)
    assert (fp8.mma_type, mxfp4.mma_type) == ("fp8xfp8", "fp8xmxfp4")
    assert dataclasses.replace(mxfp4, mma_type="fp8xfp8") == fp8


def test_models_that_cannot_run_say_why():
    loaded = presets.load_presets()
    with pytest.raises(ValueError, match="minimax-m3 is not supported: it needs MXFP8 weights"):
        loaded.find("minimax-m3")
    with pytest.raises(ValueError, match="kimi-k3 is not supported: its activation is SiTU-GLU"):
        loaded.find("kimi-k3")
    with pytest.raises(ValueError, match="model is 'gpt-2'; allowed: deepseek-v3, "):
        loaded.find("gpt-2")


def test_warmup_list(capsys):
    assert cli.main(["warmup", "--list"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["deepseek-v4-pro-mxfp4"] == "fp8xmxfp4 7168 3072 384 6 clamp 10".split()
    assert rows["deepseek-v4-pro"][:7] == "fp8xfp8 7168 3072 384 6 clamp 10;".split()
    assert rows["gpt-oss-20b"] == "fp8xmxfp4 2880 2880 32 4 swigluoai; biases".split()
    assert rows["minimax-m3"] == "it needs MXFP8 weights".split()


@pytest.mark.parametrize("names", [["deepseek-v3", "deepseek-r1"], ["gpt-oss-20b"]])
def test_warmup_requests_are_distinct(names):
    loaded = presets.load_presets()
    requests = warmup.model_requests(loaded, names, [8, 1, 8], "sm_90a", 8192)
    texts = [request.render() for request in requests]
    configs = sum(len(loaded.find(names[0]).problem(8192).configs(ranks)) for ranks in (1, 8))
    assert len(set(texts)) == len(texts) == configs + 2  # and a stage kernel each


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "minimax-m3"], "MXFP8"),
        (["--model", "deepseek-v3", "--ranks", "7"], "num_experts is 256"),
        (["--model", "deepseek-v3", "--arch", "sm_100a"], "no mega kernel for sm_100a yet"),
        ([], "--model is missing"),
    ],
)
def test_warmup_errors(arguments, message, capsys):
    assert cli.main(["warmup", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_warmup_fills_the_cache_that_a_server_then_uses(capsys, monkeypatch):
    only_stage = [
        request
        for request in warmup.model_requests(presets.load_presets(), ["qwen3-30b"], [1], "sm_90a", 64)
        if request.kind == "stage"
    ]
    monkeypatch.setattr(warmup, "model_requests", lambda *_: only_stage)
    arguments = ["warmup", "--model", "qwen3-30b", "--max-tokens", "64", "--jobs", "1"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "(1 compiled, 0 found)" in captured.out and "1/1" in captured.err
    monkeypatch.setenv("DEEP_MOE_JIT", "forbid")
    assert cli.main(arguments) == 0
    assert "(0 compiled, 1 found)" in capsys.readouterr().out
    config = presets.load_presets().find("qwen3-30b").problem(64).configs(1)[0]
    assert not jit.get_kernel(config, "stage", "sm_90a").compiled


def test_env_prints_everything_and_what_is_missing(capsys, monkeypatch, empty_cache):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for word in ("deep_moe", "python", "torch", "nvrtc", "driver", f"{empty_cache} (writable, 0 kernels)", "missing:"):
        assert word in text, word
    assert "g++ (needed by the emulator)" in text and "variable        CXX=no-such-compiler" in text


def test_env_works_with_nothing_installed_but_the_package():
    """No torch, no compiled extension, no CUDA packages: everything is named, nothing raises."""
    code = (
        "import sys\n"
        "for name in ('torch', 'cuda', 'deep_moe._C'): sys.modules[name] = None\n"
        "from deep_moe.cli import main\n"
        "sys.exit(main(['env']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CUDA_HOME")}
    environment["PATH"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("deep_moe._C (needed by everything", "nvrtc (needed to compile", "g++ (needed", "driver (needed"):
        assert name in done.stdout, name


class TwoGpus:
    """A driver that sees two H200s without peer access and one older GPU."""

    class DeviceAttribute:
        ComputeCapabilityMajor, ComputeCapabilityMinor, MultiprocessorCount = "major", "minor", "sms"

    def missing(self):
        return None

    def version(self):
        return 13000

    def device_count(self):
        return 3

    def device_name(self, device):
        return ["H200", "H200", "A100"][device]

    def device_attribute(self, device, which):
        return {"major": [9, 9, 8], "minor": [0, 0, 0], "sms": [132, 132, 108]}[which][device]

    def can_access_peer(self, device, peer):
        return {device, peer} == {0, 2}


def test_env_describes_gpus_and_peers(capsys, monkeypatch):
    monkeypatch.setattr(env, "_host_extension", lambda: type("C", (), {"driver": TwoGpus(), "__file__": "_C.so"}))
    env.EnvReport().gpus()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["driver          CUDA 13.0", "gpu 0           H200 (SM90, 132 SMs)"]
    assert "A100 (SM80, 108 SMs, not supported" in lines[3]
    assert lines[4:] == ["peers of 0      2", "peers of 1      none", "peers of 2      0"]


def test_progress_bar_on_a_file_and_on_a_terminal():
    stream = io.StringIO()
    bar = ProgressBar(4, stream)
    bar.advance("first")
    assert stream.getvalue().startswith("[######..................] 1/4  ") and stream.getvalue().endswith("first\n")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    bar = ProgressBar(2, terminal)
    bar.advance("a")
    assert terminal.getvalue().startswith("\r") and "\n" not in terminal.getvalue()
    bar.advance("b")
    assert terminal.getvalue().endswith("b\n")


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "deep_moe", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "warmup" in done.stdout
    done = subprocess.run([sys.executable, "-m", "deep_moe"], capture_output=True, text=True)
    assert done.returncode == 2 and "COMMAND" in done.stderr


def test_presets_file_is_tidy():
    content = json.loads(presets.presets_file().read_text())
    assert set(content) == {"models", "refused"}
    assert all(entry["reason"] for entry in content["refused"])
