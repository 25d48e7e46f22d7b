"""Layouts: what the host reads of include/deep_moe/layout, and that the compiler agrees."""

import subprocess

import pytest

from deep_moe import _C, Problem
from deep_moe.cli.presets import load_presets
from deep_moe.jit.paths import include_dir

DTYPE_BYTES = {"u8": 1, "u16": 2, "e4m3": 1, "bf16": 2, "i32": 4, "u32": 4, "u64": 8, "f32": 4}
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
        dict(activation=_C.Activation.SwiGLUOai),
        dict(bias=True),
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
def test_large_tiles_have_enough_stages(preset, ranks):
    """Neither a wide row nor many experts may cost a stage. Where tiles decode MXFP4 weights they come in pairs."""
    for config in preset.problem().configs(ranks):
        if config.block_m == 128:
            assert _C.num_stages(config) == (3 if config.has_decode_warps else 4)
        elif config.mma_type == _C.MmaType.Fp8xMxfp4:
            assert _C.num_stages(config) >= 6


def test_tensor_maps_stay_inside_what_they_describe():
    for config in CONFIGS:
        sizes = {name: num_bytes for name, *_, num_bytes in _C.buffer_fields(config)}
        sizes |= {f"l{i}_{acts}": sizes[f"l{i}_pool"] for i in (1, 2) for acts in ("acts", "acts_box")}
        for tensor_map in _C.tensor_maps(config):
            extents = zip(tensor_map["dims"], [1, *tensor_map["strides"]], strict=True)
            assert 1 + sum((n - 1) * stride for n, stride in extents) == sizes[tensor_map["name"]]
            assert all(stride % 16 == 0 for stride in tensor_map["strides"])
            assert all(0 < box <= 256 for box in tensor_map["box"])


def test_row_permutations():
    for config in CONFIGS:
        l1_rows, l2_rows = config.l1_weight_tiles * _C.kBlockN, config.l2_weight_tiles * _C.kBlockN
        assert 0 <= l1_rows - 2 * config.intermediate < _C.kBlockN and 0 <= l2_rows - config.hidden < _C.kBlockN
        rows = [_C.l1_row_of(channel, up) for channel in range(l1_rows // 2) for up in (False, True)]
        assert sorted(rows) == list(range(l1_rows))
        assert sorted(map(_C.l2_row_of, range(l2_rows))) == list(range(l2_rows))


def test_weights_of_an_expert_are_whole_blocks():
    for config in CONFIGS:
        l1_k, l2_k = config.l1_k_blocks * _C.kBlockK, config.l2_k_blocks * _C.kBlockK
        assert 0 <= l1_k - config.hidden < _C.kBlockK and 0 <= l2_k - config.intermediate < _C.kBlockK
        block_bytes = _C.weight_block_bytes(config.mma_type)
        assert block_bytes == {"Fp8xFp8": 32 * 1024, "Fp8xMxfp4": 17 * 1024}[config.mma_type.name]
        assert _C.l1_weight_bytes(config) == config.l1_weight_tiles * config.l1_k_blocks * block_bytes
        assert _C.l2_weight_bytes(config) == config.l2_weight_tiles * config.l2_k_blocks * block_bytes


def test_tiles_of_the_order_cover_the_weight_tiles():
    """One for one; with 8 rows and FP8 weights an L2 tile is a quarter of a weight tile, and padding makes none."""
    assert {config.block_m for config in CONFIGS} == {8, 16, 24, 32, 64, 128}
    for config in CONFIGS:
        assert config.l1_n_tiles == config.l1_weight_tiles
        if config.block_m != _C.kSwappedBlockM or config.mma_type == _C.MmaType.Fp8xMxfp4:
            assert config.l2_n_tiles == config.l2_weight_tiles
            continue
        assert config.l2_n_tiles * 64 == config.hidden
        assert -(-config.l2_n_tiles // 4) == config.l2_weight_tiles


@pytest.mark.parametrize("tiles, k_blocks", [(1, 1), (2, 3), (3, 2)])
def test_a_block_of_weights_lies_as_in_shared_memory(tiles, k_blocks):
    """Block after block, and in each every element where a tensor map with the 128-byte swizzle would put it."""
    block_bytes = _C.kBlockN * _C.kBlockK
    assert block_bytes == 32 * 1024
    for block in range(tiles * k_blocks):
        row, k = block // k_blocks * _C.kBlockN, block % k_blocks * _C.kBlockK
        rows, columns = range(row, row + _C.kBlockN), range(k, k + _C.kBlockK)
        found = [_C.weight_byte_of(k_blocks, row, k) - block * block_bytes for row in rows for k in columns]
        assert found == [address ^ (address >> 3 & 0x70) for address in range(block_bytes)]
        assert sorted(found) == list(range(block_bytes))


def accumulator_rows(quad_lane, num_rows, first_chunk=0, step=1):
    """Of a group of weight rows those whose results this lane holds: two of every 8, in its registers' order."""
    return [chunk * 8 + 2 * quad_lane + i for chunk in range(first_chunk, num_rows // 8, step) for i in range(2)]


def test_a_lane_holds_adjacent_channels():
    """So that it stores 16 bytes without shuffles: 16 e4m3 channels of l1, 8 bf16 channels of l2."""
    l1, l2 = _C.kL1GroupChannels, _C.kL2GroupChannels
    for group in (0, 1, 5):
        for quad_lane in range(4):
            first = group * l1 + quad_lane * 16
            for up in (False, True):  # even chunks hold gate rows, odd ones the up rows of the same channels
                found = [_C.l1_row_of(channel, up) - group * 2 * l1 for channel in range(first, first + 16)]
                assert found == accumulator_rows(quad_lane, 2 * l1, int(up), 2)
            first = group * l2 + quad_lane * 8
            found = [_C.l2_row_of(channel) - group * l2 for channel in range(first, first + 8)]
            assert found == accumulator_rows(quad_lane, l2)


def test_four_lanes_of_swapped_operands_hold_adjacent_channels():
    """The rows of the wgmma are weight rows then: a lane has row r and r + 8, and the lane four further the next."""
    l1_gates = {_C.l1_row_of(channel, False): channel for channel in range(128)}
    l2 = {_C.l2_row_of(channel): channel for channel in range(256)}
    for first in range(0, 256, 16):
        for row in range(first, first + 8, 2):
            assert l1_gates[row] % 2 == 0 and l1_gates[row + 1] == l1_gates[row] + 1
            assert _C.l1_row_of(l1_gates[row], True) == row + 8
            four = [l2[each] for each in (row, row + 1, row + 8, row + 9)]
            assert four[0] % 4 == 0 and four == list(range(four[0], four[0] + 4))


def test_scale_blocks_hold_whole_groups():
    """A record scales 128 gate, 128 up or 128 l2 rows, wherever their channels lie."""
    for channel in range(0, 1024):
        assert _C.l1_row_of(channel, False) // 256 == _C.l1_row_of(channel, True) // 256 == channel // 128
        assert _C.l2_row_of(channel) // 128 == channel // 128


def test_scale_records_are_whole_bulk_copies():
    for k_blocks in (1, 2, 3, 16, 57):
        records = _C.scale_records(k_blocks)
        assert k_blocks <= records <= k_blocks + 1 and records * _C.kWeightScaleRecord * 4 % 16 == 0


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


def compile_check(tmp_path, lines: list[str]) -> None:
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(lines))
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", f"-I{include_dir()}", str(source)], check=True)


def test_compiler_and_host_agree(tmp_path):
    """The literal of a configuration means the same to the compiler that builds kernels."""
    lines = ['#include "deep_moe/layout/buffer.h"', '#include "deep_moe/layout/smem.h"', "using namespace deep_moe;"]
    for config in CONFIGS[:4]:
        text = config.literal()
        lines.append(f"static_assert(buffer_bytes({text}) == {_C.buffer_bytes(config)}ull);")
        lines.append(f"static_assert(buffer_layout_hash({text}) == {_C.buffer_layout_hash(config)}ull);")
        lines.append(f"static_assert(smem_bytes({text}) == {_C.smem_bytes(config)});")
    compile_check(tmp_path, lines)


def test_channels_of_rows_are_inverse_to_rows_of_channels(tmp_path):
    channels = 2048  # several tiles
    condition = "l1_channel_of(l1_row_of(c, false)) == c && l2_channel_of(l2_row_of(c)) == c"
    loop = f"for (u32 c = 0; c < {channels}; ++c) if (!({condition})) return false; return true;"
    lines = ['#include "deep_moe/layout/weights.h"', "using namespace deep_moe;", f"static_assert([] {{ {loop} }}());"]
    compile_check(tmp_path, lines)
