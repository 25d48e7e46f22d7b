"""Problem: the description of a layer that all ranks share."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import _C
from .arch import sm90

MMA_TYPES = {"fp8xfp8": _C.MmaType.Fp8xFp8, "fp8xmxfp4": _C.MmaType.Fp8xMxfp4}
ACTIVATIONS = {"swiglu": _C.Activation.SwiGLU}

# (field, smallest, largest, divisor)
_LIMITS = (
    ("num_experts", 1, _C.kMaxExperts, 1),
    ("num_topk", 1, _C.kMaxTopk, 1),
    ("hidden", 64, 16384, 64),
    ("intermediate", 16, 1 << 20, 16),
    ("max_tokens_per_rank", 1, 1 << 26, 1),
)
# What may be forced, and the largest value.
_OVERRIDABLE = {
    "ring_rows": 1 << 30,
    "block_m": 128,
    "lag_blocks": 1 << 16,
    "unit_blocks": 1 << 16,
    "trace_events": 1 << 16,
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
        mma_type: "fp8xfp8": e4m3 activations and weights. "fp8xmxfp4": e4m3 activations and MXFP4 weights; so far only
            for `transform_weights` and the reference, there are no kernels.
        activation: "swiglu": silu(gate) * up.
        activation_clamp: c of gate = min(gate, c), up = clamp(up, -c, c); None for no clamp.
        overrides: configuration fields to force (`_OVERRIDABLE`); for tests and tuning. The others follow from them: a
            tile brings its order along, and the ring holds what the order needs.

    Raises:
        ValueError: a field is not an integer, out of range or unknown.
    """

    num_experts: int
    num_topk: int
    hidden: int
    intermediate: int
    max_tokens_per_rank: int
    mma_type: str = "fp8xfp8"
    activation: str = "swiglu"
    activation_clamp: float | None = None
    overrides: Any = ()

    def __post_init__(self) -> None:
        # Whole groups; any hidden has them.
        divisors = {"intermediate": _C.kMxfp4Group} if self.mma_type == "fp8xmxfp4" else {}
        for name, low, high, divisor in _LIMITS:
            divisor = divisors.get(name, divisor)
            object.__setattr__(self, name, _checked_int(name, getattr(self, name), low, high, divisor))
        _check_choice("mma_type", self.mma_type, MMA_TYPES)
        _check_choice("activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "activation_clamp", _checked_clamp(self.activation_clamp))
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
            activation=ACTIVATIONS[self.activation],
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


def _checked_clamp(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not (0 < value < math.inf):
        raise ValueError(f"activation_clamp is {value!r}; it must be a finite number above 0, or None for no clamp")
    return float(value)


def _checked_overrides(value: Any) -> tuple[tuple[str, int], ...]:
    items = tuple(sorted(dict(value or ()).items()))
    for name, setting in items:
        if name not in _OVERRIDABLE:
            raise ValueError(f"overrides names {name!r}; allowed: {', '.join(_OVERRIDABLE)}")
        _checked_int(f"overrides[{name!r}]", setting, 0 if name == "trace_events" else 1, _OVERRIDABLE[name], 1)
    return items
