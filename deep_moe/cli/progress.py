"""A progress bar for work that comes in countable pieces."""

import sys
import time
from typing import TextIO


class ProgressBar:
    """`[########................]  3/9  12.4 s  text`, redrawn in place on a terminal, one line per step elsewhere."""

    WIDTH = 24

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = 0
        self.stream = stream or sys.stderr
        self.start = time.monotonic()

    def advance(self, text: str) -> None:
        """One more piece is done; `text` says which."""
        self.done += 1
        self._draw(text)

    def _draw(self, text: str) -> None:
        filled = self.WIDTH * self.done // max(self.total, 1)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        line = f"[{bar}] {self.done}/{self.total}  {time.monotonic() - self.start:.1f} s  {text}"
        if not self.stream.isatty():
            end, lead = "\n", ""
        else:
            end, lead = ("\n" if self.done == self.total else ""), "\r\x1b[K"
        self.stream.write(lead + line + end)
        self.stream.flush()
