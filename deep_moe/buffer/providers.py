"""Where a symmetric buffer's memory comes from. One small interface: allocate, exchange pointers, free.

The constructor allocates this rank's part and is local. `exchange` is collective. Freeing has two steps, because no
rank may free memory that another rank still has mapped.
"""

import ctypes
import socket
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _C
from ..errors import DeviceError
from .collective import Collective
from .local_group import LocalRank


class Provider(Protocol):
    """One rank's part of a symmetric buffer."""

    memory: Tensor  # uint8 [bytes] on the rank's device

    def exchange(self, collective: Collective) -> list[int]:
        """Collective. The address of every rank's part, as this rank sees it."""

    def close_imports(self) -> None:
        """Unmap the other ranks' memory."""

    def free(self) -> None:
        """Free the own memory; no rank may have it mapped any more."""


class PlainMemory:
    """Memory that this process can reach anyway: one rank, or several ranks of a LocalGroup on GPUs."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def exchange(self, collective: Collective) -> list[int]:
        return collective.all_gather(self.memory.data_ptr())

    def close_imports(self) -> None:
        pass

    def free(self) -> None:
        self.memory = None


class TorchSymmetricMemory:
    """`torch.distributed._symmetric_memory`: one process per rank."""

    def __init__(self, group: Any, device: torch.device, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._group = group
        self._handle = None
        self.memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)

    def exchange(self, collective: Collective) -> list[int]:
        import torch.distributed._symmetric_memory as symm_mem

        _check_peers(collective, self.memory.device)
        try:
            self._handle = symm_mem.rendezvous(self.memory, self._group)
        except RuntimeError as error:
            raise DeviceError(f"torch symmetric memory could not connect the ranks: {error}") from error
        bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
        offset = self.memory.data_ptr() - bases[collective.rank()]  # of the tensor inside its allocation
        return [base + offset for base in bases]

    def close_imports(self) -> None:
        self._handle = None

    def free(self) -> None:
        self.memory = None


class EmulatorArena:
    """Memory of a rank in an emulated world."""

    def __init__(self, world: "_C.emu.World", rank: int, num_bytes: int) -> None:
        self._address = world.allocate(rank, num_bytes, "symmetric buffer")
        array = (ctypes.c_uint8 * num_bytes).from_address(self._address)
        self.memory = torch.frombuffer(array, dtype=torch.uint8)
        # Tensors that view the arena keep `array` alive, and so the memory, beyond destroy().
        weakref.finalize(array, world.release, self._address)

    def exchange(self, collective: Collective) -> list[int]:
        return collective.all_gather(self._address)

    def close_imports(self) -> None:
        pass

    def free(self) -> None:
        self.memory = None


def make_provider(
    group: Any, rank: int, size: int, device: torch.device, world: "_C.emu.World | None", num_bytes: int
) -> Provider:
    """The provider that suits a group: what `SymmBuffer` was given, None included."""
    if world is not None:
        return EmulatorArena(world, rank, num_bytes)
    if size == 1 or isinstance(group, LocalRank):
        return PlainMemory(device, num_bytes)
    return TorchSymmetricMemory(group, device, num_bytes)


def _check_peers(collective: Collective, device: torch.device) -> None:
    """Every rank has a GPU of its own, on one host, that this rank's GPU can reach. Equal outcome on all ranks."""
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    places = collective.all_gather(own)
    for rank, place in enumerate(places):
        for other in range(rank):
            if places[other] == place:
                raise ValueError(
                    f"ranks {other} and {rank} use the same GPU; give each process its own, e.g. "
                    "torch.cuda.set_device(LOCAL_RANK), or run the ranks of one GPU in one process with LocalGroup"
                )
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    blocked = [
        rank
        for rank, (host, uuid) in enumerate(places)
        if host == own[0] and uuid in visible and visible[uuid] != device.index
        if not _C.driver.can_access_peer(device.index, visible[uuid])
    ]
    reports = collective.all_gather(blocked)
    for rank, unreachable in enumerate(reports):
        if unreachable:
            raise DeviceError(
                f"the GPU of rank {rank} cannot access the memory of the GPU of rank {unreachable[0]}; "
                "use GPUs that NVLink or PCIe peer-to-peer connects"
            )
