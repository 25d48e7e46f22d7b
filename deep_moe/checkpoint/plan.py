"""What to read of a layer: checked against the files' headers before a byte of data is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from .formats import BIAS_DTYPES, Encoding, ExpertNames

GROUP_BYTES = 16  # of stacked weights: 32 columns
BIAS = " bias"  # how the names of stacks of biases end


@dataclass(frozen=True)
class Source:
    """A tensor in a file, or one row of it along its first dimension.

    data: what `safe_open(...).get_slice` gave, which reads when it is indexed.
    """

    name: str
    file: str
    data: Any
    row: int | EllipsisType = ...

    @property
    def dtype(self) -> str:
        """In the spelling of safetensors."""
        return self.data.get_dtype()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.data.get_shape())

    def copy_to(self, place: Tensor, stored: torch.dtype) -> None:
        """place: as many items, of a dtype that they are converted to by value. stored: what the bytes are."""
        place.copy_(self.data[self.row].view(stored).view(place.shape))

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


Find = Callable[[str], Source]


@dataclass(frozen=True)
class Stack:
    """One tensor [E_local, ...] of the result: where each expert's part lies in the files.

    stored: what the bytes in the files are. dtype: what they become, by value.
    """

    sources: Sequence[Source]
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """The stacks by name: "gate", "gate scales", "up", ... "down scales", or "gate_up", ... "down bias" of gpt-oss."""

    encoding: Encoding
    stacks: Mapping[str, Stack]


def num_experts(names: ExpertNames, find: Find) -> int:
    if names.num_experts is not None:
        return names.num_experts
    return _dims(find(names.tensor("gate_up", names.format.weight)), 4)[0]


def plan_layer(names: ExpertNames, find: Find, listed: Collection[str], owned: range) -> Plan:
    """The plan for the experts `owned`.

    Args:
        names: of the layer.
        find: gives the tensor of a name, or raises.
        listed: all names of the checkpoint.
        owned: numbers of experts; at least one.

    Raises:
        ValueError: a dtype or a shape is wrong.
    """
    kind = names.format
    encoding, hidden, intermediate = _geometry(names, find, owned[0])
    rows_of = {"gate_up": 2 * intermediate, "gate": intermediate, "up": intermediate, "down": hidden}
    stacks = {}
    for role in names.projections:
        rows, columns = rows_of[role], intermediate if role == "down" else hidden
        part = _Part(names, find, role, owned, hidden, intermediate)
        stacks[role] = part.stack(kind.weight, encoding.weight_dtypes, encoding.weight_shape(rows, columns))
        scale_shape = encoding.scale_shape(rows, columns)
        stacks[f"{role} scales"] = part.stack(kind.scales, encoding.scale_dtypes, scale_shape, encoding.wanted_scales)
        if kind.bias and names.tensor(role, kind.bias) in listed:
            stacks[role + BIAS] = part.stack(kind.bias, BIAS_DTYPES, (rows,))
    return Plan(encoding, stacks)


def _geometry(names: ExpertNames, find: Find, expert: int) -> tuple[Encoding, int, int]:
    """Encoding, hidden and intermediate, as this expert's gate has them; everything else is compared with it."""
    kind = names.format
    if kind.stacked:
        weight = find(names.tensor("gate_up", kind.weight))
        _, rows, groups, _ = _dims(weight, 4)
        rows, row_bytes = rows // 2, groups * GROUP_BYTES
    else:
        weight = find(names.tensor("gate", kind.weight, expert))
        rows, row_bytes = _dims(weight, 2)
    for encoding in kind.encodings:
        if weight.dtype in encoding.weight_dtypes:
            return encoding, row_bytes * encoding.per_byte, rows
    raise _wrong_dtype(weight, [dtype for encoding in kind.encodings for dtype in encoding.weight_dtypes])


@dataclass(frozen=True)
class _Part:
    """One projection of the owned experts, in a layer of these sizes."""

    names: ExpertNames
    find: Find
    role: str
    owned: range
    hidden: int
    intermediate: int

    def stack(
        self,
        suffix: str,
        dtypes: Mapping[str, torch.dtype],
        shape: tuple[int, ...],
        wanted: torch.dtype | None = None,
    ) -> Stack:
        """shape: of one expert. wanted: the dtype to convert to."""
        if self.names.format.stacked:
            whole = self.find(self.names.tensor(self.role, suffix))
            grouped = suffix == self.names.format.weight
            in_file = (*shape[:-1], shape[-1] // GROUP_BYTES, GROUP_BYTES) if grouped else shape
            self._check(whole, dtypes, (num_experts(self.names, self.find), *in_file))
            sources = [replace(whole, row=expert) for expert in self.owned]
        else:
            sources = [self.find(self.names.tensor(self.role, suffix, expert)) for expert in self.owned]
            for source in sources:
                self._check(source, dtypes, shape)
                if source.dtype != sources[0].dtype:
                    raise ValueError(
                        f"{source} has dtype {source.dtype}, but {sources[0]} has {sources[0].dtype}: one tensor "
                        "cannot hold both; convert one of them"
                    )
        stored = dtypes[sources[0].dtype]
        return Stack(sources, (len(sources), *shape), stored, wanted or stored)

    def _check(self, source: Source, dtypes: Collection[str], shape: tuple[int, ...]) -> None:
        if source.dtype not in dtypes:
            raise _wrong_dtype(source, dtypes)
        if source.shape != shape:
            raise ValueError(
                f"{source} has shape {list(source.shape)}; it must have {list(shape)}, as the gate of the first expert "
                f"that was asked for has hidden {self.hidden} and intermediate {self.intermediate}"
            )


def _dims(source: Source, count: int) -> tuple[int, ...]:
    if len(source.shape) != count:
        raise ValueError(f"{source} has shape {list(source.shape)}; it must have {count} dimensions")
    return source.shape


def _wrong_dtype(source: Source, dtypes: Collection[str]) -> ValueError:
    return ValueError(f"{source} has dtype {source.dtype}; it must be {' or '.join(dtypes)}")
