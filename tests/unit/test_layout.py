"""Layouts: what the host reads of include/deep_moe/layout, and that the compiler agrees."""

import subprocess

import pytest

from deep_moe import _C, Problem
from deep_moe.cli.presets import load_presets
from deep_moe.jit.paths import include_dir

DTYPE_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "i32": 4, "u32": 4, "u64": 8, "f32": 4}
ODD = Problem(num_experts=24, num_topk=3, hidden=192, intermediate=80, max_tokens_per_rank=130)


def model_configs():
    for preset in load_presets().models:
        for ranks in (1, 8, 72):
            problem = preset.problem()
            if problem.num_experts % ranks == 0:
                yield from problem.configs(ranks)


CONFIGS = [*ODD.configs(1), *ODD.configs(8), *model_configs()]


@pytest.mark.parametrize("fields_of, total_of", [(_C.buffer_fields, _C.buffer_bytes), (_C.smem_fields, _C.smem_bytes)])
def test_fields_follow_each_other_without_overlap(fields_of, total_of):
    for config in CONFIGS:
        end = 0
        for name, dtype, shape, offset, num_bytes in fields_of(config):
            assert offset >= end, f"{name} overlaps the field before it in {config}"
            assert offset % 16 == 0, name
            assert num_bytes == DTYPE_BYTES[dtype] * shape[0] * shape[1] * shape[2], name
            end = offset + num_bytes
        assert end <= total_of(config) < end + (1 << 16)


def test_names_are_unique():
    for fields in (_C.buffer_fields(CONFIGS[0]), _C.smem_fields(CONFIGS[0])):
        names = [field[0] for field in fields]
        assert len(set(names)) == len(names)


def test_header_words_lie_inside_the_header():
    header = next(field for field in _C.buffer_fields(CONFIGS[0]) if field[0] == "header")
    end = 0
    for name, offset, size in _C.header_fields():
        assert offset >= end and offset % size == 0, name
        end = offset + size
    assert end <= header[4]


def test_all_variants_of_a_problem_share_one_buffer():
    for problem, ranks in ((ODD, 1), (ODD, 8), (load_presets().models[0].problem(), 8)):
        configs = problem.configs(ranks)
        assert len({_C.buffer_layout_hash(config) for config in configs}) == 1
        assert len({tuple(_C.buffer_fields(config)) for config in configs}) == 1


@pytest.mark.parametrize(
    "change",
    [
        dict(num_experts=48),
        dict(num_topk=4),
        dict(hidden=256),
        dict(intermediate=96),
        dict(max_tokens_per_rank=131),
        dict(ring_rows=128 * 64),
    ],
    ids=lambda change: next(iter(change)),
)
def test_layout_hash_sees_every_geometry_field(change):
    config = ODD.configs(1)[0]
    assert _C.buffer_layout_hash(config.replace(**change)) != _C.buffer_layout_hash(config)


def test_layout_hash_sees_the_number_of_ranks():
    assert _C.buffer_layout_hash(ODD.configs(1)[0]) != _C.buffer_layout_hash(ODD.configs(2)[0])


def test_shared_memory_fits_with_a_pipeline():
    for config in CONFIGS:
        assert _C.smem_bytes(config) <= _C.kMaxSmemBytes, config
        assert _C.num_stages(config) >= 3, config


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("preset", load_presets().models, ids=lambda preset: preset.name)
def test_large_tiles_have_four_stages(preset, ranks):
    """Neither a wide row nor many experts may cost a stage."""
    large = [config for config in preset.problem().configs(ranks) if config.block_m == 128]
    assert large and all(_C.num_stages(config) == 4 for config in large)


def test_tensor_maps_stay_inside_what_they_describe():
    for config in CONFIGS:
        sizes = {name: num_bytes for name, *_, num_bytes in _C.buffer_fields(config)}
        matrix = config.experts_per_rank * config.hidden * config.intermediate
        sizes |= {"l1_acts": sizes["l1_pool"], "l2_acts": sizes["l2_pool"]}
        sizes |= {"l1_weights": 2 * matrix, "l2_weights": matrix}
        for tensor_map in _C.tensor_maps(config):
            extents = zip(tensor_map["dims"], [1, *tensor_map["strides"]], strict=True)
            assert 1 + sum((n - 1) * stride for n, stride in extents) == sizes[tensor_map["name"]]
            assert all(stride % 16 == 0 for stride in tensor_map["strides"])
            assert all(0 < box <= 256 for box in tensor_map["box"])


def test_interleaved_rows_are_a_permutation():
    rows = [_C.l1_row_of(channel, up) for channel in range(80) for up in (False, True)]
    assert sorted(rows) == list(range(160))
    assert [_C.l1_row_of(c, False) for c in (0, 7, 8)] == [0, 7, 16]
    assert [_C.l1_row_of(c, True) for c in (0, 7, 8)] == [8, 15, 24]


def test_config_is_a_value():
    config = _C.Config(hidden=1024, block_m=128)
    assert config == _C.Config(block_m=128, hidden=1024) and hash(config) == hash(config.replace())
    assert config.replace(hidden=512) != config and config.hidden == 1024
    assert config.error() is None
    assert "multiple of 64" in config.replace(hidden=100).error()
    with pytest.raises(AttributeError):
        config.hidden = 3
    with pytest.raises(TypeError, match="no field 'hiden'"):
        _C.Config(hiden=3)


def test_compiler_and_host_agree(tmp_path):
    """The literal of a configuration means the same to the compiler that builds kernels."""
    lines = ['#include "deep_moe/layout/buffer.h"', '#include "deep_moe/layout/smem.h"', "using namespace deep_moe;"]
    for config in CONFIGS[:4]:
        text = config.literal()
        lines.append(f"static_assert(buffer_bytes({text}) == {_C.buffer_bytes(config)}ull);")
        lines.append(f"static_assert(buffer_layout_hash({text}) == {_C.buffer_layout_hash(config)}ull);")
        lines.append(f"static_assert(smem_bytes({text}) == {_C.smem_bytes(config)});")
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(lines))
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", f"-I{include_dir()}", str(source)], check=True)
