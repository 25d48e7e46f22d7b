"""`python -m deep_moe demo` where there is no GPU; its 64-token problem is the geometry main-4."""

import contextlib
import json

import pytest

from deep_moe import cli, testing
from deep_moe.cli import demo


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(demo, "usable_gpus", lambda: ([], "no SM90 GPU"))


def test_a_layer_of_four_ranks_on_the_emulator(capsys):
    assert cli.main(["demo", "--tokens", "1", "64", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on the CPU emulator (no SM90 GPU)") and lines[1].startswith("4 ranks, 16 experts, top-4")
    assert lines[3].split() == ["ranks", "tokens/rank", "error", "at", "most", "time"]
    rows = [line.split() for line in lines[4:6]]
    assert [row[:2] for row in rows] == [["4", "1"], ["4", "64"]]
    assert all(0 < float(row[2]) <= float(row[3]) for row in rows) and lines[-1] == "ok"


def test_a_traced_layer(capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert cli.main(["demo", "--tokens", "8", "--trace", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"traced, in {path}; rank 0: " in text and "L1 Multiply" in text and text.rstrip().endswith("ok")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3} and {event["ph"] for event in events} == {"M", "X"}


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_an_error_that_is_too_large_fails(capsys, monkeypatch, error):
    monkeypatch.setattr(demo, "measure", lambda world, tokens, seed, repeats: demo.Row(tokens, error, 0.1))
    monkeypatch.setattr(testing, "World", lambda *_: contextlib.nullcontext())
    assert cli.main(["demo", "--tokens", "8"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hidden", "65"], "hidden is 65"),
        (["--mma-type", "bf16"], "this version supports 'fp8xfp8'"),
        (["--topk", "17"], "num_topk is 17"),
        (["--tokens", "0"], "max_tokens_per_rank is 0"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    assert cli.main(["demo", *arguments]) == 1
    assert message in capsys.readouterr().err
