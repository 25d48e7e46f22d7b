"""One safetensors file: its header, and reads of byte ranges straight into a tensor's memory.

The file format is that of https://github.com/huggingface/safetensors#format: 8 bytes with the header's size, a header
in JSON (dtype, shape and place of every tensor), the data. It is read here and not with the `safetensors` package,
because that maps files and gives tensors of its own: here bytes go where they are wanted in one copy, several threads
read one file, and no byte of another expert is fetched, which matters on a network file system.
"""

import ctypes
import json
import math
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package

ITEM_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}  # dtypes of expert tensors


class TensorFile:
    """An open safetensors file.

    Raises:
        FileNotFoundError: there is none. ValueError: it is truncated, or is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._fd)
        self._entries, self._data_begin = self._read_header()

    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, name: str) -> "Source | None":
        """The tensor of this name; None where the file has none."""
        if name not in self._entries:
            return None
        dtype, shape, begin, end = self._entries[name]
        if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
            raise self._broken(f"{name}, {dtype} {list(shape)}, has {end - begin} bytes")
        return Source(self, name, dtype, shape, self._data_begin + begin)

    def read(self, begin: int, num_bytes: int, address: int) -> None:
        """Bytes of the file to memory that the caller keeps alive. Threads may read at the same time."""
        done = 0
        while done < num_bytes:  # the system reads 2 GB at a time at most
            memory = (ctypes.c_char * (num_bytes - done)).from_address(address + done)
            count = os.preadv(self._fd, [memory], begin + done)
            if not count:
                raise self._broken(f"it ends at byte {begin + done}, {num_bytes - done} bytes too early")
            done += count

    def _read_header(self) -> tuple[dict[str, tuple], int]:
        """(dtype, shape, first byte and end within the data) by name, and where the data begin."""
        size = os.fstat(self._fd).st_size
        start = os.pread(self._fd, PREFIX_BYTES, 0)
        header_bytes = int.from_bytes(start, "little")
        if start == b"version ":
            raise self._broken("it is a Git LFS pointer")
        if header_bytes > min(size - PREFIX_BYTES, MAX_HEADER_BYTES):
            raise self._broken(f"there is no header in its {size} bytes")
        try:
            header = json.loads(os.pread(self._fd, header_bytes, PREFIX_BYTES))
            header.pop("__metadata__", None)
            entries = {
                name: (entry["dtype"], tuple(entry["shape"]), *map(int, entry["data_offsets"]))
                for name, entry in header.items()
            }
            promised = PREFIX_BYTES + header_bytes + max((end for *_, end in entries.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._broken(f"its header cannot be read: {error!r}") from error
        if size != promised:
            raise self._broken(f"it has {size} bytes, but its header describes {promised}")
        return entries, PREFIX_BYTES + header_bytes

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is truncated or no safetensors file ({what}): download it again")


@dataclass(frozen=True)
class Source:
    """A tensor in a file, or one row of it along its first dimension.

    dtype is in the spelling of safetensors; begin is its first byte in the file.
    """

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def __str__(self) -> str:
        return f"{self.name} in {self.file.path.name}"

    def row(self, index: int) -> "Source":
        stride = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        return Source(self.file, self.name, self.dtype, self.shape[1:], self.begin + index * stride)

    def read_into(self, memory: Tensor) -> None:
        """Its bytes to a contiguous CPU tensor with as many of them."""
        num_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if not memory.is_contiguous() or memory.nbytes != num_bytes:
            raise AssertionError(f"{self} has {num_bytes} bytes; its place has {memory.nbytes}")
        self.file.read(self.begin, num_bytes, memory.data_ptr())
