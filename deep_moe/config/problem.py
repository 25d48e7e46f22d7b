"""Problem: the description of a layer that all ranks share."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from .. import _C
from .arch import sm90

MMA_TYPES = {"fp8xfp8": _C.MmaType.Fp8xFp8, "fp8xmxfp4": _C.MmaType.Fp8xMxfp4}


class ActivationDefaults(NamedTuple):
    """An activation of the kernels, and what its numbers are where a Problem does not say."""

    kind: "_C.Activation"
    clamp: float | None  # None: no clamp
    alpha: float | None  # None: it has no alpha


# swigluoai: the numbers of gpt-oss (config.json: swiglu_limit; openai/gpt-oss, torch/model.py).
ACTIVATIONS = {
    "swiglu": ActivationDefaults(_C.Activation.SwiGLU, clamp=None, alpha=None),
    "swigluoai": ActivationDefaults(_C.Activation.SwiGLUOai, clamp=7.0, alpha=1.702),
}

# (field, smallest, largest, divisor)
_LIMITS = (
    ("num_experts", 1, _C.kMaxExperts, 1),
    ("num_topk", 1, _C.kMaxTopk, 1),
    ("hidden", 64, 16384, 64),
    ("intermediate", 16, 1 << 20, 16),
    ("max_tokens_per_rank", 1, 1 << 26, 1),
)
# What may be forced, from the smallest to the largest value.
_OVERRIDABLE = {
    "ring_rows": (1, 1 << 30),
    "decoded_slots": (1, 1 << 16),
    "block_m": (1, 128),
    "lag_blocks": (1, 1 << 16),
    "unit_blocks": (1, 1 << 16),
    "decode_ahead": (0, 1),
    "trace_events": (0, 1 << 16),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One expert-parallel MoE layer. Equal on all ranks; hashable.

    Args:
        num_experts: experts of all ranks together, 1 to 1024. Rank r owns the r-th contiguous part.
        num_topk: experts per token, 1 to 16.
        hidden: channels of x and y; a multiple of 64.
        intermediate: channels between the two GEMMs (of gate, and of up); a multiple of 16, or of 32 for
            "fp8xmxfp4".
        max_tokens_per_rank: the most tokens any rank may stage.
        mma_type: "fp8xfp8": e4m3 activations and weights, for `fp8_mega_moe`. "fp8xmxfp4": e4m3 activations and MXFP4
            weights, for `fp8_mxfp4_mega_moe`.
        activation: "swiglu": silu(gate) * up; "swigluoai": gate * sigmoid(alpha * gate) * (up + 1), of gpt-oss.
        activation_clamp: c of gate = min(gate, c), up = clamp(up, -c, c), which comes before; gpt-oss calls it limit.
            None: no clamp with "swiglu", 7.0 with "swigluoai".
        activation_alpha: alpha of "swigluoai"; None: 1.702. "swiglu" has none.
        bias: experts have biases: of gate and up before the clamp, and of down, weighted like the expert's output.
            `transform_weights` takes them.
        overrides: configuration fields to force (`_OVERRIDABLE`); for tests and tuning. The others follow from them: a
            tile brings its order along, and the ring holds what the order needs.

    Raises:
        ValueError: a field has the wrong type, is out of range or unknown, or does not go with the activation.
    """

    num_experts: int
    num_topk: int
    hidden: int
    intermediate: int
    max_tokens_per_rank: int
    mma_type: str = "fp8xfp8"
    activation: str = "swiglu"
    activation_clamp: float | None = None
    activation_alpha: float | None = None
    bias: bool = False
    overrides: Any = ()

    def __post_init__(self) -> None:
        # Whole groups; any hidden has them.
        divisors = {"intermediate": _C.kMxfp4Group} if self.mma_type == "fp8xmxfp4" else {}
        for name, low, high, divisor in _LIMITS:
            divisor = divisors.get(name, divisor)
            object.__setattr__(self, name, _checked_int(name, getattr(self, name), low, high, divisor))
        _check_choice("mma_type", self.mma_type, MMA_TYPES)
        _check_choice("activation", self.activation, ACTIVATIONS)
        # With defaults filled in: ranks that disagree are told the numbers.
        defaults = ACTIVATIONS[self.activation]
        object.__setattr__(self, "activation_clamp", _checked_clamp(self.activation_clamp, defaults))
        object.__setattr__(self, "activation_alpha", _checked_alpha(self.activation_alpha, defaults, self.activation))
        if not isinstance(self.bias, bool):
            raise ValueError(f"bias is {self.bias!r}; it must be True or False: transform_weights takes the biases")
        object.__setattr__(self, "overrides", _checked_overrides(self.overrides))

    def experts_per_rank(self, num_ranks: int) -> int:
        """Experts that each of `num_ranks` ranks owns."""
        return self.num_experts // self._checked_ranks(num_ranks)

    def bound_classes(self, num_ranks: int) -> tuple[int, ...]:
        """Ascending token bounds per rank, the last is max_tokens_per_rank.

        `num_tokens_bound` selects the first one that is not below it; each class has a kernel of its own.
        """
        return sm90.bound_classes(self._geometry(num_ranks))

    def configs(self, num_ranks: int) -> "list[_C.Config]":
        """The kernel configuration of each bound class, in their order.

        Raises:
            ValueError: num_experts is not divisible by num_ranks, or the overrides do not fit together.
        """
        geometry = self._geometry(num_ranks)
        if geometry.max_recv_rows >= 1 << 31:
            raise ValueError(
                f"num_ranks * max_tokens_per_rank * num_topk is {geometry.max_recv_rows}; it must be below 2^31: "
                "lower max_tokens_per_rank"
            )
        configs = sm90.variant_configs(geometry, dict(self.overrides))
        for config in configs:
            if config.error():
                raise ValueError(f"{config.error()}; got {config}")
            if _C.num_stages(config) < 2:
                raise ValueError(
                    f"hidden {self.hidden} with {self.num_experts} experts leaves shared memory for fewer than two "
                    "pipeline stages; use a smaller hidden or fewer experts"
                )
        return configs

    def buffer_bytes(self, num_ranks: int) -> int:
        """Bytes of one rank's symmetric buffer, without allocating it."""
        return _C.buffer_bytes(self.configs(num_ranks)[0])

    def facts(self) -> dict[str, Any]:
        """The fields by name, for messages and for the comparison between ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _geometry(self, num_ranks: int) -> "_C.Config":
        """What all variants share; ring_rows and the variant fields have their defaults."""
        return _C.Config(
            num_ranks=self._checked_ranks(num_ranks),
            mma_type=MMA_TYPES[self.mma_type],
            activation=ACTIVATIONS[self.activation].kind,
            bias=self.bias,
            **{name: getattr(self, name) for name, *_ in _LIMITS},
        )

    def _checked_ranks(self, num_ranks: int) -> int:
        num_ranks = _checked_int("num_ranks", num_ranks, 1, _C.kMaxRanks, 1)
        if self.num_experts % num_ranks:
            raise ValueError(
                f"num_experts is {self.num_experts}, which {num_ranks} ranks cannot share equally; "
                "use a number of ranks that divides it, or pad the experts"
            )
        return num_ranks


def _checked_int(name: str, value: Any, low: int, high: int, divisor: int) -> int:
    allowed = f"an integer from {low} to {high}" + (f" that is a multiple of {divisor}" if divisor > 1 else "")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    if not low <= value <= high or value % divisor:
        remedy = ""
        if value > 0 and value % divisor:
            remedy = f"; pad it with zero channels to {-(-value // divisor) * divisor}"
        raise ValueError(f"{name} is {value}; it must be {allowed}{remedy}")
    return int(value)


def _check_choice(name: str, value: Any, allowed: Mapping[str, Any]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; this version supports {', '.join(map(repr, allowed))}")


def _checked_clamp(value: Any, defaults: ActivationDefaults) -> float | None:
    if value is None:
        return defaults.clamp
    if not _is_positive(value):
        without = "no clamp" if defaults.clamp is None else defaults.clamp
        raise ValueError(f"activation_clamp is {value!r}; it must be {_POSITIVE}, or None for {without}")
    return float(value)


def _checked_alpha(value: Any, defaults: ActivationDefaults, activation: str) -> float | None:
    if value is None:
        return defaults.alpha
    if defaults.alpha is None:
        having = ", ".join(repr(name) for name, other in ACTIVATIONS.items() if other.alpha is not None)
        raise ValueError(
            f"activation_alpha is {value!r}, but {activation!r} has no alpha; leave it out, or use {having}"
        )
    if not _is_positive(value):
        raise ValueError(f"activation_alpha is {value!r}; it must be {_POSITIVE}, or None for {defaults.alpha}")
    return float(value)


_POSITIVE = "a number from 2^-64 to 2^64"  # so that products with it stay far from the ends of fp32


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 2.0**-64 <= value <= 2.0**64


def _checked_overrides(value: Any) -> tuple[tuple[str, int], ...]:
    items = tuple(sorted(dict(value or ()).items()))
    for name, setting in items:
        if name not in _OVERRIDABLE:
            raise ValueError(f"overrides names {name!r}; allowed: {', '.join(_OVERRIDABLE)}")
        _checked_int(f"overrides[{name!r}]", setting, *_OVERRIDABLE[name], 1)
    return items
