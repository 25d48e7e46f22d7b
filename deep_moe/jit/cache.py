"""The kernel cache: one writable root and any number of read-only roots, shared by processes and machines.

An entry is a folder `<root>/<kind>-<arch>-<key>/` that holds

    kernel.cubin (or kernel.so)   the binary
    source.cu                     the translation unit it came from
    meta.json                     size and sha256 of the binary, compiler, flags, ptxas report

It is prepared under a temporary name and published by one rename, so it is there whole or not at all; the loser of a
race throws its copy away and uses the winner's. Every load checks size and checksum: an entry damaged by a full disk or
an interrupted copy is set aside and built again. A lock per entry keeps processes from compiling the same kernel at the
same time. It is an flock, which ends with its process; a wait for it is bounded, and nothing breaks without it.
"""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .paths import default_cache_root

META = "meta.json"
LOCK_WAIT_S = 300.0  # after this long another process is thought stuck, and we compile as well
LEFTOVER_AGE_S = 3600.0  # temporary folders of killed processes are removed after this long


@dataclass(frozen=True)
class Entry:
    """A checked entry. path: the binary. meta: the content of meta.json."""

    path: Path
    meta: dict


class Damaged(Exception):
    """An entry that is there but cannot be used; the message says why."""


def load_entry(folder: Path, name: str) -> Entry | None:
    """The entry in `folder`, whose name, size and checksum must be right; None if there is none. Raises Damaged."""
    try:
        meta = json.loads((folder / META).read_bytes())
        binary = (folder / meta["file"]).read_bytes()
        holds, expected = meta["name"], (meta["size"], meta["sha256"])
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            return None
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"unreadable: {error}") from error
    if holds != name:
        raise Damaged(f"it holds another kernel, {holds}")
    if expected != (len(binary), hashlib.sha256(binary).hexdigest()):
        raise Damaged(f"{meta['file']} has {len(binary)} of {expected[0]} bytes or another checksum")
    return Entry(folder / meta["file"], meta)


class Cache:
    """Lookup and publication. `roots[0]` is the writable one; None stands for "no writable root"."""

    def __init__(self, writable: Path | None, read_only: list[Path]) -> None:
        self.writable = writable
        self.read_only = read_only

    def find(self, name: str) -> Entry | None:
        """The first good entry called `name`. A damaged one is skipped with a warning, and set aside where writable."""
        for root in [self.writable, *self.read_only]:
            if root is None:
                continue
            try:
                entry = load_entry(root / name, name)
            except Damaged as damage:
                warnings.warn(f"kernel cache entry {root / name} is damaged: {damage}; rebuilding it", stacklevel=2)
                if root == self.writable:
                    self._set_aside(name)
                continue
            if entry is not None:
                return entry
        return None

    def publish(self, name: str, file: str, binary: bytes, source: str, meta: dict) -> Entry:
        """Writes an entry, or returns the winner's when another process was faster. Needs a writable root."""
        assert self.writable is not None
        temporary = self.writable / f".tmp-{uuid.uuid4().hex}"
        temporary.mkdir(parents=True)
        try:
            (temporary / file).write_bytes(binary)
            (temporary / "source.cu").write_text(source, encoding="utf-8")
            meta = {**meta, "file": file, "size": len(binary), "sha256": hashlib.sha256(binary).hexdigest()}
            (temporary / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            return self._rename(temporary, name) or Entry(self.writable / name / file, meta)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            self._remove_leftovers()

    def _rename(self, temporary: Path, name: str) -> Entry | None:
        """Moves a finished entry into place. Returns the winner's, if another process was faster."""
        final = self.writable / name
        for _ in range(10):
            try:
                os.rename(temporary, final)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            winner = self.find(name)  # sets a damaged one aside; then we try again
            if winner is not None:
                return winner
        raise OSError(f"cannot publish {final}: another entry of that name comes back damaged again and again")

    def _set_aside(self, name: str) -> None:
        """Moves a damaged entry out of the way; one that another process has just repaired is put back."""
        folder, aside = self.writable / name, self.writable / f".damaged-{name}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError, Damaged):
            os.rename(folder, aside)
            load_entry(aside, name)
            os.rename(aside, folder)

    def _remove_leftovers(self) -> None:
        """Temporary and set-aside folders older than an hour."""
        with contextlib.suppress(OSError):
            for pattern in (".tmp-*", ".damaged-*"):
                for folder in self.writable.glob(pattern):
                    if time.time() - folder.stat().st_mtime > LEFTOVER_AGE_S:
                        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Advisory: held by at most one process per entry; passes unlocked where locks do not work or take too long."""
        handle = None
        try:
            with contextlib.suppress(OSError):
                folder = self.writable / ".locks"
                folder.mkdir(exist_ok=True)
                handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
                _flock_within(handle, LOCK_WAIT_S)
            yield
        finally:
            if handle is not None:
                os.close(handle)


def _flock_within(handle: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


_private_root: Path | None = None
_private_lock = threading.Lock()


def open_cache() -> Cache:
    """The cache that `DEEP_MOE_CACHE_DIR=/writable:/read-only:...` describes.

    Without the variable: one root, `jit_cache/kernels` in a checkout, else `~/.cache/deep_moe`. When the first root
    cannot be written it is still read, and new kernels go to a private temporary folder (see private_cache).
    """
    text = os.environ.get("DEEP_MOE_CACHE_DIR", "")
    roots = [Path(part).expanduser() for part in text.split(os.pathsep) if part]
    if not roots:
        default = default_cache_root()
        roots = [default] if default else []
    if roots and _is_writable(roots[0]):
        return Cache(roots[0], roots[1:])
    return Cache(_private_root, roots)


def _is_writable(root: Path) -> bool:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(root, os.W_OK | os.X_OK)


def private_cache(cache: Cache, reason: str) -> Cache:
    """`cache` with its writable root replaced by a temporary folder that lives as long as this process."""
    global _private_root
    with _private_lock:
        if _private_root is None:
            _private_root = Path(tempfile.mkdtemp(prefix="deep_moe-cache-"))
            atexit.register(_remove_private_root, _private_root, os.getpid())
            warnings.warn(
                f"the kernel cache cannot be written ({reason}); compiled kernels are kept for this process only. "
                "Set DEEP_MOE_CACHE_DIR=/writable/folder to keep them",
                stacklevel=2,
            )
    return Cache(_private_root, [root for root in (cache.writable, *cache.read_only) if root])


def _remove_private_root(root: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not
        shutil.rmtree(root, ignore_errors=True)
