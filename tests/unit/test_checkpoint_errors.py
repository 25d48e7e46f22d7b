"""Checkpoint: what is said, and when, about a broken checkpoint or a wrong argument."""

import importlib
import sys

import pytest
import torch
from checkpoint_files import CT, GPT_OSS, K3, V3, V4, E, Written, draw, write_gpt_oss

from deep_moe.checkpoint import Checkpoint
from deep_moe.checkpoint import checkpoint as module
from deep_moe.checkpoint.checkpoint import INDEX, SINGLE

V3_UP = "model.layers.1.mlp.experts.5.up_proj"


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    return V3.write(tmp_path_factory.mktemp("v3"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def message(error, call, *arguments, **named):
    with pytest.raises(error) as raised:
        call(*arguments, **named)
    return str(raised.value)


def has(text, *words):
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


def changed(written, **tensors):
    """The checkpoint written again with tensors changed: name to tensor, or to None to leave it out."""
    for name, tensor in tensors.items():
        if tensor is None:
            del written.tensors[name]
        else:
            written.tensors[name] = tensor
    return written.save()


def test_no_checkpoint(tmp_path):
    has(message(FileNotFoundError, Checkpoint, tmp_path), str(tmp_path), INDEX, SINGLE)
    has(message(FileNotFoundError, Checkpoint, tmp_path / "nowhere"), "nowhere holds no checkpoint")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    has(message(ValueError, Checkpoint, tmp_path), INDEX, "weight_map", "download it again")


@pytest.mark.parametrize("found", [".weight", ".weight_scale", "none"])
def test_unknown_format(tmp_path, found):
    """Weights that are not quantised, a format that is not read, a model without experts."""
    name = (
        f"model.layers.1.mlp.experts.0.gate_proj{found}" if found != "none" else "model.layers.1.mlp.gate_proj.weight"
    )
    text = message(ValueError, Written(tmp_path, {name: torch.zeros(2, 2)}).save().open)
    has(text, "known format", "E.gate_proj.weight and E.gate_proj.weight_scale_inv", "E.gate_proj.scale")
    has(text, "weight_packed", "gate_up_proj_blocks", f"Found {name if found != 'none' else 'no tensors of experts'}")


def test_mixed_formats(tmp_path):
    """Two layers, or the model and its draft model, in two formats."""
    tensors = V3.write(tmp_path, layers=(1,)).tensors
    draft = {f"mtp.{name}": tensor for name, tensor in CT.write(tmp_path, layers=(2,)).tensors.items()}
    written = Written(tmp_path, tensors | draft).save()
    text = message(ValueError, written.open)
    has(text, "mixed", "deepseek-fp8", "model.layers.1.mlp.experts.", "compressed-tensors-mxfp4", "mtp.model.layers.2")
    has(text, "prefix=")
    assert written.open(prefix="model.").format == V3.format
    assert written.open(prefix="mtp.").moe_layers == (2,)


def test_two_parts_with_a_layer_of_the_same_number(tmp_path):
    tensors = V3.write(tmp_path, layers=(1,), experts=2).tensors
    draft = {f"mtp.{name}": 0 * tensor.view(torch.uint8) for name, tensor in tensors.items()}
    written = Written(tmp_path, tensors | {name: t.view(tensors[name[4:]].dtype) for name, t in draft.items()}).save()
    has(message(ValueError, written.open), "layer 1", "model.layers.1", "mtp.model.layers.1", "prefix=")
    gate = written.open(prefix="model.").experts(1).gate[0]
    assert torch.equal(
        gate[1].view(torch.uint8), tensors[V3_UP.replace("5.up", "1.gate") + ".weight"].view(torch.uint8)
    )


def test_layers_that_are_not_quantised_are_no_moe_layers(tmp_path):
    """Draft layers often are not."""
    written = V3.write(tmp_path, layers=(1,))
    extra = {
        "model.layers.2.mlp.experts.0.gate_proj.weight": torch.zeros(2, 2),
        "mtp.layers.1.experts.0.w1": draw(1, 2),
    }
    assert changed(written, **extra).open().moe_layers == (1,)


@pytest.mark.parametrize("suffix", V3.suffixes)
def test_a_tensor_that_is_not_listed(tmp_path, suffix):
    """Every rank is told, not only the one that owns the expert."""
    checkpoint = changed(V3.write(tmp_path), **{V3_UP + suffix: None}).open()
    for rank in range(4):
        has(message(ValueError, checkpoint.experts, 1, rank, 4), V3_UP + suffix, "missing", str(tmp_path))
    has(message(ValueError, checkpoint.num_experts, 1), V3_UP + suffix)
    assert checkpoint.experts(11, 2, 4).num_experts == 2


def test_an_expert_that_is_not_listed(tmp_path):
    written = V4.write(tmp_path)
    for name in [name for name in written.tensors if name.startswith("layers.1.ffn.experts.3.")]:
        del written.tensors[name]
    has(message(ValueError, written.save().open().experts, 1), "layers.1.ffn.experts.3.w1.weight is missing")


@pytest.mark.parametrize(
    "config, arguments, source",
    [
        ({"n_routed_experts": E}, {}, "config.json has n_routed_experts 8"),
        ({"text_config": {"num_experts": E}}, {}, "config.json has num_experts 8"),
        ({"n_routed_experts": 6}, {"num_experts": E}, "num_experts is 8"),
        (None, {"num_experts": E}, "num_experts is 8"),
    ],
)
def test_the_last_experts_are_not_listed(tmp_path, config, arguments, source):
    """Of one layer; six experts could be those of a smaller model. Every rank is told."""
    written = V3.write(tmp_path).without(".layers.1.mlp.experts.6.", ".layers.1.mlp.experts.7.")
    assert written.open().num_experts(1) == 6
    if config:
        written.save_config(config)
    checkpoint = written.open(**arguments)
    for call in (lambda: checkpoint.num_experts(1), lambda: checkpoint.experts(1, 0, 2)):
        has(message(ValueError, call), "model.layers.1.mlp.experts.6.gate_proj.weight is missing", source, "download")
    assert checkpoint.experts(11, 3, 4).num_experts == 2


@pytest.mark.parametrize("number", [4, 16])
def test_more_experts_than_are_known(v3, gpt_oss, number):
    """Stacked ones may also be too few: nothing is missing by name."""
    for written in (v3, gpt_oss) if number < E else (gpt_oss,):
        checkpoint = written.open(num_experts=number)
        for call in (checkpoint.num_experts, checkpoint.experts):
            has(message(ValueError, call, 1), "layer 1 has 8 experts", f"num_experts is {number}", "num_experts=8")


def test_a_broken_config(tmp_path):
    written = V3.write(tmp_path, layers=(1,))
    for text in ("{", "[]", "\xff"):
        text = message(ValueError, written.save_config(text).open)
        has(text, str(tmp_path / "config.json"), "cannot be read", "download it again", "num_experts=")


@pytest.mark.parametrize("number", [0, -1, True, 8.0, "8"])
def test_wrong_number_of_experts(v3, number):
    has(message(ValueError, v3.open, num_experts=number), f"num_experts is {number!r}", "positive integer", "None")


@pytest.mark.parametrize("prefix", [None, 3, ("model.",), b"model."])
def test_wrong_prefix(v3, prefix):
    has(message(TypeError, v3.open, prefix=prefix), f"prefix is a {type(prefix).__name__}", "must be a string")


def test_a_tensor_that_is_not_in_its_file(tmp_path):
    written = V3.write(tmp_path)
    name = f"{V3_UP}.weight"
    written.file_of[name] = "model-1-4.safetensors"
    written.save_index()
    has(message(ValueError, written.open().experts, 1, 2, 4), name, "model-1-4.safetensors", "different checkpoints")


def test_a_missing_file(tmp_path):
    written = V3.write(tmp_path)
    (tmp_path / "model-1-5.safetensors").unlink()
    checkpoint = written.open()
    text = message(FileNotFoundError, checkpoint.experts, 1, 2, 4)
    has(text, "model-1-5.safetensors is missing", "model.layers.1.mlp.experts.5.gate_proj.weight", "download")
    assert checkpoint.experts(1, 3, 4).num_experts == 2


def test_a_folder_in_the_place_of_a_file(tmp_path):
    written = V3.write(tmp_path)
    path = tmp_path / "model-1-5.safetensors"
    path.unlink()
    path.mkdir()
    text = message(ValueError, written.open().experts, 1, 2, 4)
    has(text, f"{path} is a directory", "must be a safetensors file", "download")


def test_a_file_that_the_system_does_not_give(tmp_path, monkeypatch):
    """As safetensors says it, without the name of the file."""
    written = V3.write(tmp_path)

    def denied(path, framework):
        raise PermissionError("Permission denied (os error 13)")

    monkeypatch.setattr(module, "safe_open", denied)
    text = message(ValueError, written.open().experts, 1, 2, 4)
    has(text, f"{tmp_path / 'model-1-4.safetensors'} cannot be read (Permission denied (os error 13))")


@pytest.mark.parametrize("raw", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None])
def test_a_damaged_file(tmp_path, raw):
    """Empty, a Git LFS pointer, cut short."""
    written = V3.write(tmp_path, layers=(1,))
    path = tmp_path / "model-1-5.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if raw is None else raw)
    text = message(ValueError, written.open().experts, 1, 2, 4)
    has(text, f"{path} cannot be read (Error while deserializing header", "truncated", "LFS pointer", "download it")


def test_without_safetensors(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("deep_moe.checkpoint")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    text = message(ImportError, importlib.import_module, "deep_moe.checkpoint")
    has(text, "needs the safetensors package", "pip install 'deep_moe[checkpoint]'")


@pytest.mark.parametrize(
    "kind, name, tensor, words",
    [
        (V3, "5.up_proj.weight", torch.zeros(192, 320).half(), "has dtype F16; it must be F8_E4M3"),
        (V3, "4.gate_proj.weight", torch.zeros(192, 320).half(), "has dtype F16; it must be F8_E4M3"),
        (V3, "5.up_proj.weight_scale_inv", torch.ones(2, 3).half(), "it must be F32 or BF16 or F8_E8M0 or U8"),
        (
            V3,
            "5.up_proj.weight_scale_inv",
            torch.ones(2, 3).bfloat16(),
            "has dtype BF16, but model.layers.1.mlp.experts.4.up",
        ),
        (V3, "5.up_proj.weight_scale_inv", torch.ones(3, 2), "has shape [3, 2]; it must have [2, 3]"),
        (V3, "5.up_proj.weight", draw(0, 320, 192).view(torch.float8_e4m3fn), "it must have [192, 320]"),
        (V3, "4.gate_proj.weight", draw(0, 192).view(torch.float8_e4m3fn), "has shape [192]; it must have 2 dim"),
        (V3, "4.down_proj.weight", draw(0, 192, 320).view(torch.float8_e4m3fn), "it must have [320, 192]"),
        (V4, "4.w1.weight", torch.zeros(192, 160).int(), "has dtype I32; it must be U8 or I8 or F8_E4M3"),
        (V4, "5.w2.scale", draw(0, 320, 6), "has dtype U8, but layers.1.ffn.experts.4.w2.scale in model-1-4"),
        (V4, "5.w2.weight", draw(0, 320, 95).view(torch.int8), "has shape [320, 95]; it must have [320, 96]"),
        (CT, "4.gate_proj.weight_packed", torch.zeros(192, 40).int(), "has dtype I32; it must be U8"),
        (
            CT,
            "4.gate_proj.weight_scale",
            draw(0, 192, 20).view(torch.float8_e4m3fn),
            "has dtype F8_E4M3; it must be U8",
        ),
        (K3, "5.w3.weight_scale", draw(0, 192, 11), "has shape [192, 11]; it must have [192, 10]"),
    ],
)
def test_wrong_dtypes_and_shapes(tmp_path, kind, name, tensor, words):
    """Also what other formats with the same names hold: int4 and NVFP4. Memory that is reused is left as it was."""
    written = kind.write(tmp_path, layers=(1,))
    out = written.open().experts(1, 2, 4)
    before = {part: memory.clone() for part, memory in out.storage.items()}
    full_name = kind.stem.format(1) + name
    checkpoint = changed(written, **{full_name: tensor}).open()
    text = message(ValueError, checkpoint.experts, 1, 2, 4, out=out)
    has(text, f"{full_name} in model-1-{name[0]}.safetensors", words)
    for part, memory in out.storage.items():
        assert torch.equal(memory.view(torch.uint8), before[part].view(torch.uint8))


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        ("gate_up_proj_blocks", draw(0, E, 384, 160), "has shape [8, 384, 160]; it must have 4 dimensions"),
        ("gate_up_proj_blocks", draw(0, E, 383, 10, 16), "has shape [8, 383, 10, 16]; it must have [8, 382, 10, 16]"),
        ("gate_up_proj_scales", draw(0, E, 384, 9), "has shape [8, 384, 9]; it must have [8, 384, 10]"),
        ("gate_up_proj_scales", draw(0, E - 1, 384, 10), "it must have [8, 384, 10]"),
        ("gate_up_proj_bias", torch.zeros(E, 384).int(), "has dtype I32; it must be BF16 or F32 or F16"),
        ("down_proj_blocks", draw(0, E, 320, 5, 16), "it must have [8, 320, 6, 16]"),
        ("down_proj_bias", torch.zeros(E, 192), "has shape [8, 192]; it must have [8, 320]"),
        ("down_proj_blocks", None, "is missing"),
    ],
)
def test_wrong_tensors_of_gpt_oss(tmp_path, name, tensor, words):
    full_name = GPT_OSS.format(1) + name
    checkpoint = changed(write_gpt_oss(tmp_path), **{full_name: tensor}).open()
    has(message(ValueError, checkpoint.experts, 1), full_name, words)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "fpga", "hpu", 3.5, ["cpu"], f"cuda:{1 << 6}"])
def test_wrong_device(v3, device):
    """Of every way in which torch refuses one; what it says can be pages long."""
    text = message(ValueError, v3.open().experts, 1, 0, 4, device)
    has(text, f"device is {device!r}, which torch cannot use (", "'cpu'", "'cuda:0'")
    assert len(text) < 400


@pytest.mark.parametrize("layer", [0, 2, -1, -11, True, None, "1", 1.0, [1]])
def test_wrong_layer(v3, layer):
    checkpoint = v3.open()
    for call in (checkpoint.experts, checkpoint.num_experts):
        has(message(ValueError, call, layer), f"layer is {layer!r}", "deepseek-fp8", "[1, 11]")


@pytest.mark.parametrize(
    "rank, num_ranks, words",
    [
        (0, 3, ["num_ranks is 3", "8 experts"]),
        (0, 0, ["num_ranks is 0", "from 1 to 8"]),
        (0, 16, ["num_ranks is 16", "from 1 to 8"]),
        (0, "2", ["num_ranks is '2'"]),
        (0, True, ["num_ranks is True"]),
        (2, 2, ["rank is 2", "from 0 to 1"]),
        (-1, 2, ["rank is -1"]),
        (None, 2, ["rank is None", "an integer"]),
    ],
)
def test_wrong_ranks(v3, gpt_oss, rank, num_ranks, words):
    for written in (v3, gpt_oss):
        has(message(ValueError, written.open().experts, 1, rank, num_ranks), *words)


def test_wrong_out(v3, gpt_oss):
    checkpoint = v3.open()
    half, mxfp4 = checkpoint.experts(1, 0, 2), gpt_oss.open().experts(1)
    has(message(TypeError, checkpoint.experts, 1, out=half.gate), "out is a tuple", "ExpertShards")
    text = message(ValueError, checkpoint.experts, 1, out=half)
    has(text, "torch.float8_e4m3fn [4, 192, 320] on cpu for gate", "[8, 192, 320]", "out=None")
    has(message(ValueError, checkpoint.experts, 1, out=mxfp4), "out holds nothing for gate")
    has(message(ValueError, checkpoint.experts, 1, 0, 2, "meta", half), "on cpu for gate", "on meta")


def test_shards_and_checkpoints_say_what_they_are(tmp_path):
    written = V3.write(tmp_path)
    assert repr(written.open()) == f"Checkpoint({str(tmp_path)!r}, deepseek-fp8, 2 MoE layers)"
    assert (
        repr(written.open().experts(1, 0, 4)) == "ExpertShards(2 experts, hidden=320, intermediate=192, fp8xfp8, cpu)"
    )
