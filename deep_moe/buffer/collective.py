"""How ranks meet on the host: one small interface over torch.distributed, the threads of a LocalGroup, or one rank."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..errors import DeepMoeError

T = TypeVar("T")


class Collective(Protocol):
    """The host side of a rank group."""

    def rank(self) -> int:
        """This rank, from 0."""

    def size(self) -> int:
        """Number of ranks."""

    def barrier(self) -> None:
        """Returns once all ranks have called it."""

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's value (any picklable object), in rank order."""


class SingleRank:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def barrier(self) -> None:
        pass

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class ProcessGroup:
    """A `torch.distributed` process group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self.group)

    def size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size(self.group)

    def barrier(self) -> None:
        self.all_gather(None)  # a plain barrier would need to be told the device

    def all_gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size()
        dist.all_gather_object(values, value, group=self.group)
        return values


def together(collective: Collective, what: str, step: Callable[[], T]) -> T:
    """Runs a local step on every rank; if it fails on one of them, all raise, and nobody waits for ever.

    Returns this rank's result. The failing rank raises its own error, the others a DeepMoeError that quotes it.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as caught:  # it is raised below, once the other ranks know
        error = caught
    reports = collective.all_gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise DeepMoeError(f"rank {rank} could not {what}: {report}")
    return result
