"""Checkpoint: every format bit for bit, and only this rank's files."""

from pathlib import Path

import pytest
import torch
from checkpoint_files import GPT_OSS, INTER, KINDS, LAYERS, V3, V4, E, H, Written, write_gpt_oss
from safetensors import safe_open
from safetensors.torch import save_file

import deep_moe
from deep_moe import reference, testing
from deep_moe.checkpoint import Checkpoint
from deep_moe.checkpoint import checkpoint as module


def same(ours, wanted):
    """dtype, shape and every bit, but for those that make a NaN of fp32 this or that NaN."""
    if ours.dtype is torch.float32:
        ours, wanted = (tensor.where(~tensor.isnan(), torch.nan) for tensor in (ours, wanted))
    equal = torch.equal(ours.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    return ours.dtype is wanted.dtype and ours.shape == wanted.shape and equal


def flat(shards):
    return [*shards.gate, *shards.up, *shards.down]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_experts_are_those_of_the_files_bit_for_bit(tmp_path, kind, num_ranks):
    written = kind.write(tmp_path)
    with written.open() as checkpoint:
        assert checkpoint.format == kind.format and checkpoint.moe_layers == LAYERS
        for layer in LAYERS:
            assert checkpoint.num_experts(layer) == E
            for rank in range(num_ranks):
                shards = checkpoint.experts(layer, rank, num_ranks)
                owned = range(rank * E // num_ranks, (rank + 1) * E // num_ranks)
                for ours, wanted in zip(flat(shards), kind.wanted(written.tensors, layer, owned), strict=True):
                    assert same(ours, wanted)
                assert (shards.num_experts, shards.hidden, shards.intermediate) == (E // num_ranks, H, INTER)
                assert shards.mma_type == ("fp8xfp8" if kind.is_fp8 else "fp8xmxfp4")
                assert (shards.gate_bias, shards.up_bias, shards.down_bias) == (None, None, None)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gpt_oss_bit_for_bit(tmp_path, num_ranks):
    written = write_gpt_oss(tmp_path)
    checkpoint = written.open()
    assert checkpoint.format == "gpt-oss-mxfp4" and checkpoint.moe_layers == LAYERS
    for layer in LAYERS:
        assert checkpoint.num_experts(layer) == E
        for rank in range(num_ranks):
            shards = checkpoint.experts(layer, rank, num_ranks)
            owned = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
            gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias = (
                written.tensors[f"{GPT_OSS.format(layer)}{name}{suffix}"][owned]
                for name in ("gate_up_proj", "down_proj")
                for suffix in ("_blocks", "_scales", "_bias")
            )
            for turn, (weights, scales) in enumerate(shards.gate_up):
                assert same(weights, gate_up[:, turn::2].flatten(2)) and same(scales, gate_up_sf[:, turn::2])
            assert same(shards.gate_bias, gate_up_bias[:, ::2]) and same(shards.up_bias, gate_up_bias[:, 1::2])
            assert same(shards.down[0], down.flatten(2)) and same(shards.down[1], down_sf)
            assert same(shards.down_bias, down_bias)
            assert (shards.hidden, shards.intermediate, shards.mma_type) == (H, INTER, "fp8xmxfp4")


def test_gpt_oss_without_biases(tmp_path):
    shards = write_gpt_oss(tmp_path, bias=False).open().experts(1)
    assert (shards.gate_bias, shards.up_bias, shards.down_bias) == (None, None, None)


def test_one_file_without_an_index(tmp_path):
    tensors = V3.write(tmp_path / "sharded").tensors
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        tmp_path / module.SINGLE,
        metadata={"format": "pt"},
    )
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.format == V3.format and checkpoint.moe_layers == LAYERS
    for ours, wanted in zip(flat(checkpoint.experts(11, 1, 2)), V3.wanted(tensors, 11, range(4, 8)), strict=True):
        assert same(ours, wanted)


def test_files_of_other_experts_are_not_needed(tmp_path):
    written = V4.write(tmp_path)
    for file in set(written.file_of.values()) - {"model-11-2.safetensors", "model-11-3.safetensors"}:
        (tmp_path / file).unlink()
    for ours, wanted in zip(
        flat(written.open().experts(11, 1, 4)), V4.wanted(written.tensors, 11, (2, 3)), strict=True
    ):
        assert same(ours, wanted)


def test_every_file_is_opened_once_until_close(tmp_path, monkeypatch):
    written, opened = V3.write(tmp_path), []

    def spy(path, **arguments):
        opened.append(path.name)
        return safe_open(path, **arguments)

    monkeypatch.setattr(module, "safe_open", spy)
    with written.open() as checkpoint:
        assert not opened
        for rank in (0, 1, 0):
            shards = checkpoint.experts(1, rank, 4)
        assert sorted(opened) == [f"model-1-{expert}.safetensors" for expert in range(4)]
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()  # nor do results hold a file
    again = checkpoint.experts(1, 3, 4)
    for result, owned in ((shards, (0, 1)), (again, (6, 7))):
        for ours, wanted in zip(flat(result), V3.wanted(written.tensors, 1, owned), strict=True):
            assert same(ours, wanted)


def test_out_is_reused(tmp_path):
    for number, written in enumerate((V3.write(tmp_path / "v3"), write_gpt_oss(tmp_path / "oss"))):
        checkpoint = written.open()
        first = checkpoint.experts(1, 1, 4)
        fresh = checkpoint.experts(11, 1, 4)
        assert not same(first.gate[0], fresh.gate[0])
        again = checkpoint.experts(11, 1, 4, out=first)
        for ours, wanted, old in zip(flat(again), flat(fresh), flat(first), strict=True):
            assert same(ours, wanted) and ours.data_ptr() == old.data_ptr()
        assert number == 0 or same(again.up_bias, fresh.up_bias)


def test_out_may_lack_biases(tmp_path):
    """They get memory of their own; the rest keeps its place."""
    bare = write_gpt_oss(tmp_path / "bare", bias=False).open().experts(1, 1, 4)
    checkpoint = write_gpt_oss(tmp_path / "biased").open()
    fresh, again = checkpoint.experts(11, 1, 4), checkpoint.experts(11, 1, 4, out=bare)
    for name in ("gate_bias", "up_bias", "down_bias"):
        assert same(getattr(again, name), getattr(fresh, name))
    for ours, wanted, old in zip(flat(again), flat(fresh), flat(bare), strict=True):
        assert same(ours, wanted) and ours.data_ptr() == old.data_ptr()
    once_more = checkpoint.experts(1, 1, 4, out=again)
    assert once_more.down_bias.data_ptr() == again.down_bias.data_ptr()
    without = write_gpt_oss(tmp_path / "bare", bias=False).open().experts(11, 1, 4, out=again)
    assert (without.gate_bias, without.up_bias, without.down_bias) == (None, None, None)
    assert without.down[0].data_ptr() == bare.down[0].data_ptr()


CONFIGS = [
    {"n_routed_experts": E, "num_experts_per_tok": 2},
    {"num_local_experts": E, "num_experts": E},
    {"num_experts": None, "text_config": {"num_experts": E}, "vision_config": {"num_experts": 3}},
    {"n_routed_experts": E, "text_config": None},
    {"num_experts": [E, 3]},
    {"num_experts": 3, "n_routed_experts": 5},
    {"num_experts": True},
    {},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_that_agrees_or_does_not_tell(tmp_path, config):
    """A list, numbers that contradict each other, none at all: then the highest expert that is listed tells."""
    for written in (V3.write(tmp_path / "v3"), write_gpt_oss(tmp_path / "oss")):
        checkpoint = written.save_config(config).open()
        assert checkpoint.num_experts(1) == E and checkpoint.experts(11, 3, 4).num_experts == 2


def test_the_number_that_is_given_counts(tmp_path):
    """And config.json is not even read."""
    for written in (V3.write(tmp_path / "v3"), write_gpt_oss(tmp_path / "oss")):
        for config in ({"num_experts": 3}, "{"):
            checkpoint = written.save_config(config).open(num_experts=E)
            assert checkpoint.num_experts(1) == E and checkpoint.experts(11, 3, 4).num_experts == 2


def test_fp8_from_the_files_to_the_kernel_layout(tmp_path):
    """What comes out of transform_weights has the values of the tensors that a checkpoint was made of."""
    problem = deep_moe.Problem(num_experts=4, num_topk=2, hidden=H, intermediate=INTER, max_tokens_per_rank=8)
    weights = testing.random_weights(problem)
    tensors = {}
    for name, (q, sf) in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
        for expert in range(4):
            stem = f"model.layers.3.mlp.experts.{expert}.{name}_proj.weight"
            tensors |= {stem: q[expert], f"{stem}_scale_inv": sf[expert]}
    checkpoint = Written(tmp_path, tensors).save().open()
    for rank in (0, 1):
        shards, mine = checkpoint.experts(3, rank, 2), slice(2 * rank, 2 * rank + 2)
        assert shards.mma_type == problem.mma_type
        l1, l2 = deep_moe.transform_weights(problem, shards.gate_up, shards.down)
        gate, up, down = (reference.dequantize_blocks(*part)[mine] for part in (weights.gate, weights.up, weights.down))
        assert torch.equal(l1.dequantize(), torch.cat([gate, up], 1)) and torch.equal(l2.dequantize(), down)
