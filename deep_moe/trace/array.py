"""The memory that a traced kernel writes its spans to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .record import Trace, trace_of


class TraceArray:
    """One rank's trace array, next to its symmetric buffer. Of zero bytes when the kernels do not trace.

    Args:
        configs: of the buffer's variants.
        num_sms: the most CTAs of a launch.
    """

    def __init__(self, configs: "Sequence[_C.Config]", device: torch.device, num_sms: int) -> None:
        self._configs = configs
        self.num_bytes = _C.trace_bytes(configs[0], num_sms)
        self._memory = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        """What the kernel is given; 0 when it does not trace."""
        return self._memory.data_ptr() if self.num_bytes else 0

    def free(self) -> None:
        """Gives the memory back; no launch may follow."""
        self._memory = self._memory[:0].clone()

    def clear(self) -> None:
        """Forgets earlier launches; asynchronous, on the current stream."""
        self._memory.zero_()

    def read(self, rank: int, recv_counts: Tensor) -> Trace:
        """The last launch, which has ended. recv_counts: i32 [ranks, experts per rank]: the rows of that launch.

        Raises:
            ValueError: the kernels do not trace, or there was no launch.
        """
        if not self.num_bytes:
            raise ValueError('this buffer does not trace; give its Problem overrides={"trace_events": 4096}')
        return trace_of(rank, self._configs, self._memory.cpu(), recv_counts.sum(0).tolist())
