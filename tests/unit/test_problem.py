"""Problem: what it accepts, its bound classes and its kernel configurations."""

import dataclasses

import pytest

from deep_moe import Problem
from deep_moe.cli.presets import load_presets

FLASH = dict(num_experts=256, num_topk=6, hidden=4096, intermediate=2048, max_tokens_per_rank=8192)


def test_fields_and_defaults():
    problem = Problem(**FLASH)
    assert (problem.mma_type, problem.activation, problem.activation_clamp) == ("fp8xfp8", "swiglu", None)
    assert problem == Problem(**FLASH) and hash(problem) == hash(Problem(**FLASH))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.hidden = 128
    assert Problem(**FLASH, activation_clamp=10).activation_clamp == 10.0


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_experts=0), ["num_experts is 0", "1 to 1024"]),
        (dict(num_experts=1025), ["num_experts is 1025"]),
        (dict(num_topk=17), ["num_topk is 17", "1 to 16"]),
        (dict(num_topk=2.0), ["num_topk is 2.0", "an integer"]),
        (dict(num_topk=True), ["num_topk is True"]),
        (dict(hidden=4100), ["hidden is 4100", "multiple of 64", "pad", "4160"]),
        (dict(hidden=0), ["hidden is 0"]),
        (dict(intermediate=2056), ["intermediate is 2056", "multiple of 16", "2064"]),
        (dict(max_tokens_per_rank=0), ["max_tokens_per_rank is 0"]),
        (dict(max_tokens_per_rank=None), ["max_tokens_per_rank is None"]),
        (dict(mma_type="fp8xmxfp4"), ["mma_type is 'fp8xmxfp4'", "'fp8xfp8'"]),
        (dict(mma_type=None), ["mma_type is None"]),
        (dict(activation="gelu"), ["activation is 'gelu'", "'swiglu'"]),
        (dict(activation_clamp=0.0), ["activation_clamp is 0.0", "above 0", "None"]),
        (dict(activation_clamp=float("inf")), ["activation_clamp is inf"]),
        (dict(activation_clamp="10"), ["activation_clamp is '10'"]),
        (dict(overrides=dict(hidden=64)), ["'hidden'", "ring_rows"]),
    ],
)
def test_wrong_fields_are_named(change, words):
    with pytest.raises(ValueError) as error:
        Problem(**{**FLASH, **change})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("ranks", [0, 73, 3, "2"])
def test_wrong_number_of_ranks(ranks):
    for method in (Problem(**FLASH).configs, Problem(**FLASH).bound_classes, Problem(**FLASH).buffer_bytes):
        with pytest.raises(ValueError, match="ranks"):
            method(ranks)


def test_too_many_rows_for_the_layout():
    problem = Problem(**{**FLASH, "max_tokens_per_rank": 1 << 26})
    with pytest.raises(ValueError, match=r"below 2\^31.*lower max_tokens_per_rank"):
        problem.configs(8)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_small_class_ends_where_an_expert_expects_64_rows(ranks):
    problem = Problem(**FLASH)
    small, largest = problem.bound_classes(ranks)
    assert largest == problem.max_tokens_per_rank
    assert small * ranks * problem.num_topk <= 64 * problem.num_experts < (small + 1) * ranks * problem.num_topk
    assert [config.block_m for config in problem.configs(ranks)] == [64, 128]
    assert [config.bound_class for config in problem.configs(ranks)] == [0, 1]


def test_one_class_where_one_is_enough():
    small = Problem(**{**FLASH, "max_tokens_per_rank": 300})
    assert small.bound_classes(8) == (300,)
    assert [config.block_m for config in small.configs(8)] == [64]
    crowded = Problem(num_experts=2, num_topk=16, hidden=64, intermediate=16, max_tokens_per_rank=100)
    assert crowded.bound_classes(2) == (4, 100)


def test_classes_depend_on_nothing_local():
    """Everything a kernel variant depends on is a function of the problem and the number of ranks."""
    assert Problem(**FLASH).configs(8) == Problem(**FLASH).configs(8)
    geometry = ("num_ranks", "num_experts", "num_topk", "hidden", "intermediate", "max_tokens_per_rank", "ring_rows")
    configs = Problem(**FLASH).configs(8)
    assert len({tuple(getattr(config, name) for name in geometry) for config in configs}) == 1


@pytest.mark.parametrize("tokens", [1, 7, 64, 129, 8192])
@pytest.mark.parametrize("preset", load_presets().models, ids=lambda preset: preset.name)
def test_every_preset_has_valid_configs(preset, tokens):
    problem = preset.problem(tokens)
    for ranks in (ranks for ranks in (1, 2, 4, 8, 16, 64) if problem.num_experts % ranks == 0):
        for config in problem.configs(ranks):
            assert config.error() is None
            assert config.ring_blocks >= min(
                config.lag_blocks + config.unit_blocks, config.max_blocks_of(config.block_m)
            )


def test_overrides_reach_the_configs():
    problem = Problem(**FLASH, overrides=dict(ring_rows=1024, lag_blocks=4, unit_blocks=2))
    for config in problem.configs(2):
        assert (config.ring_rows, config.lag_blocks, config.unit_blocks) == (1024, 4, 2)
    with pytest.raises(ValueError, match="ring_rows"):
        Problem(**FLASH, overrides=dict(ring_rows=128)).configs(2)


def test_buffer_size_of_the_flash_slice():
    """32 local experts, one rank, 8192 tokens: the best public kernel needs 632 MiB."""
    assert Problem(**{**FLASH, "num_experts": 32}).buffer_bytes(1) <= 632 << 20
