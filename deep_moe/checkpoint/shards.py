"""ExpertShards: the experts of one rank, in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .plan import BIAS, Plan

Pair = tuple[Tensor, Tensor]  # weights and their scales


@dataclass(frozen=True, eq=False, repr=False)
class ExpertShards:
    """One rank's experts of one layer, in natural layout, as the checkpoint has them.

    Attributes:
        gate, up: weights [E_local, I, H] and scales. down: the same for [E_local, H, I]. With mma_type
            "fp8xfp8": e4m3 [E_local, N, K] and fp32 [E_local, ceil(N/128), ceil(K/128)], multipliers of 128x128 blocks.
            With "fp8xmxfp4": uint8 [E_local, N, K/2], the low nibble being the even column, and [E_local, N, K/32] in
            the checkpoint's dtype: uint8 (e means 2^(e - 127)), float8_e8m0fnu or fp32.
        gate_bias, up_bias: [E_local, I]; down_bias: [E_local, H]; in the checkpoint's dtype, or None.
        mma_type: what `Problem` needs for them.
        storage: the memory, by what it holds. Gate and up of gpt-oss are strided views of one tensor, which has their
            rows in turns.
    """

    gate: Pair
    up: Pair
    down: Pair
    mma_type: str
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    storage: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def gate_up(self) -> tuple[Pair, Pair]:
        """What `transform_weights` takes, beside `down`."""
        return self.gate, self.up

    @property
    def num_experts(self) -> int:
        """E_local."""
        return self.gate[0].shape[0]

    @property
    def hidden(self) -> int:
        return self.down[0].shape[1]

    @property
    def intermediate(self) -> int:
        return self.gate[0].shape[1]

    def __repr__(self) -> str:
        sizes = f"hidden={self.hidden}, intermediate={self.intermediate}"
        return f"ExpertShards({self.num_experts} experts, {sizes}, {self.mma_type}, {self.gate[0].device})"


def shards_in(storage: Mapping[str, Tensor], mma_type: str) -> ExpertShards:
    """Views of memory with the stacks of a plan."""
    if "gate_up" in storage:
        both = _parts(storage, "gate_up")
        gate, up = ([part if part is None else part[:, turn::2] for part in both] for turn in (0, 1))
    else:
        gate, up = _parts(storage, "gate"), _parts(storage, "up")
    down = _parts(storage, "down")
    pairs = [(weights, scales) for weights, scales, _ in (gate, up, down)]
    return ExpertShards(*pairs, mma_type, *(bias for _, _, bias in (gate, up, down)), storage=storage)


def _parts(storage: Mapping[str, Tensor], role: str) -> list[Tensor | None]:
    return [storage.get(role), storage.get(f"{role} scales"), storage.get(role + BIAS)]


def allocate(plan: Plan, device: torch.device, out: ExpertShards | None) -> dict[str, Tensor]:
    """Memory for the stacks of a plan: that of `out`, new where there is none, or where only biases are missing."""
    if out is not None and not isinstance(out, ExpertShards):
        raise TypeError(f"out is a {type(out).__name__}; it must be the ExpertShards of an earlier call, or None")
    storage = {}
    for name, stack in plan.stacks.items():
        memory = None if out is None else out.storage.get(name)
        if out is None or (memory is None and name.endswith(BIAS)):
            storage[name] = torch.empty(stack.shape, dtype=stack.dtype, device=device)
            continue
        wanted = _described(stack.shape, stack.dtype, device)
        found = "nothing" if memory is None else _described(memory.shape, memory.dtype, memory.device)
        if found != wanted:
            raise ValueError(f"out holds {found} for {name}, but this layer and device need {wanted}: pass out=None")
        storage[name] = memory
    return storage


def _described(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype} {list(shape)} on {device}"
