"""What a compiler is given: a short entry text and every header that it reaches, by content.

The compilers see exactly the bytes that were hashed (in memory, or copied beside the entry), so a header edited while a
kernel compiles cannot end up under the wrong key.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import JitError

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(include|if|ifdef|ifndef|elif|else|endif)\b[ \t]*(.*?)[ \t]*(?://.*)?$", re.M)
_INCLUDE = re.compile(r'^(?:"([^"]+)"|<([^>]+)>)$')
_OURS = "deep_moe/"


@dataclass(frozen=True)
class Source:
    """A translation unit.

    name: file name shown in compiler messages. entry: its text. headers: include name -> text, sorted by name.
    """

    name: str
    entry: str
    headers: dict[str, str]

    def digest(self) -> "hashlib._Hash":
        """A sha256 that has taken in the entry and every header, by name and content."""
        sha = hashlib.sha256()
        for name, text in [*self.headers.items(), ("", self.entry)]:
            for part in (name.encode(), text.encode()):
                sha.update(len(part).to_bytes(8, "little"))
                sha.update(part)
        return sha


def includes_of(text: str, emulator: bool) -> list[tuple[str, bool]]:
    """(name, in angle brackets) of every include that `text` may reach.

    Only conditions on DM_EMULATOR alone are decided: the GPU's headers must not depend on the emulator's, and the other
    way round. Both branches of any other condition count.
    """
    found: list[tuple[str, bool]] = []
    branches: list[bool | None] = []  # one per open #if: taken, not taken, or unknown
    for directive, rest in _DIRECTIVE.findall(text):
        if directive == "endif":
            del branches[-1:]
        elif directive == "else":
            branches[-1:] = [None if branch is None else not branch for branch in branches[-1:]]
        elif directive == "elif":
            branches[-1:] = [None]
        elif directive != "include":
            branches.append(_decide(directive, rest, emulator))
        elif False not in branches:
            match = _INCLUDE.match(rest)
            if not match:
                raise JitError(f'#include {rest}: only "{_OURS}..." or <...> can be followed')
            found.append((match[1] or match[2], match[1] is None))
    return found


def _decide(directive: str, condition: str, emulator: bool) -> bool | None:
    """Value of an #if whose condition is DM_EMULATOR or its negation; None for any other."""
    words = condition.replace("(", " ").replace(")", " ").replace("!", " ! ").split()
    if [word for word in words if word not in ("!", "defined")] != ["DM_EMULATOR"]:
        return None
    negated = directive == "ifndef" or "!" in words
    return emulator != negated


@dataclass
class HeaderTree:
    """Reads headers under `root` once per file: one consistent view for all kernels of one request."""

    root: Path
    _texts: dict[str, str] = field(default_factory=dict)

    def source(self, name: str, entry: str, emulator: bool) -> Source:
        """`entry` with all the headers it reaches. JitError on an include that is not below `root`."""
        headers: dict[str, str] = {}
        pending = [(name, entry)]
        while pending:
            includer, text = pending.pop()
            for header, angled in includes_of(text, emulator):
                if header in headers:
                    continue
                if not header.startswith(_OURS):
                    # The emulator is ordinary C++: the standard library is part of the compiler, and so of the key.
                    if emulator and angled:
                        continue
                    raise JitError(f"{includer} includes {header}, but device headers may include {_OURS}... only")
                headers[header] = self._read(header, includer)
                pending.append((header, headers[header]))
        return Source(name, entry, dict(sorted(headers.items())))

    def _read(self, header: str, includer: str) -> str:
        if header not in self._texts:
            try:
                self._texts[header] = (self.root / header).read_text(encoding="utf-8")
            except OSError as error:
                raise JitError(f"{includer} includes {header}: {error.strerror} ({self.root / header})") from error
        return self._texts[header]
