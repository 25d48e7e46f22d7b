"""From gate and up to one value per channel, in the precision of its arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """The activation of a layer with its numbers; fields as in `deep_moe.Problem`. NaN passes through.

    kind: "swiglu": silu(gate) * up. "swigluoai": gate * sigmoid(alpha * gate) * (up + 1), from openai/gpt-oss
        (torch/model.py). clamp: gate <= clamp and |up| <= clamp before that; None: neither. alpha: "swigluoai" needs
        one, and "swiglu" has none.
    """

    kind: str = "swiglu"
    clamp: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("swiglu", "swigluoai"):
            raise ValueError(f"activation is {self.kind!r}; the reference knows 'swiglu' and 'swigluoai'")
        if (self.kind == "swigluoai") != (self.alpha is not None):
            raise ValueError(f"alpha is {self.alpha!r}; 'swigluoai' needs one, and 'swiglu' has none")

    @classmethod
    def of(cls, problem) -> "Activation":
        """That of a `deep_moe.Problem`."""
        return cls(problem.activation, problem.activation_clamp, problem.activation_alpha)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        if self.kind == "swiglu":
            return gate / (1 + torch.exp(-gate)) * up
        return gate / (1 + torch.exp(-self.alpha * gate)) * (up + 1)
