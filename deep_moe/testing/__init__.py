"""For tests and benches: random problems, routing patterns, poison, error metrics, and a harness that runs all ranks of
a layer in one process through the public API."""

from deep_moe.testing.harness import (
    Rank,
    RankInputs,
    RankResult,
    World,
    assert_close,
    expected,
    layer_of,
    padded,
    random_inputs,
    run_layer,
)
from deep_moe.testing.inputs import (
    DISTRIBUTIONS,
    Weights,
    generator_of,
    random_activations,
    random_weights,
)
from deep_moe.testing.metrics import DEFAULT_BAR, Error, error_bar, error_of, same_bits
from deep_moe.testing.poison import POISON_BYTE, is_poison, poison, poison_buffer
from deep_moe.testing.routing import Pattern, Routing

__all__ = [
    "DISTRIBUTIONS",
    "POISON_BYTE",
    "DEFAULT_BAR",
    "Error",
    "Pattern",
    "Rank",
    "RankInputs",
    "RankResult",
    "Routing",
    "Weights",
    "World",
    "assert_close",
    "error_bar",
    "error_of",
    "expected",
    "generator_of",
    "is_poison",
    "layer_of",
    "padded",
    "poison",
    "poison_buffer",
    "random_activations",
    "random_inputs",
    "random_weights",
    "run_layer",
    "same_bits",
]
