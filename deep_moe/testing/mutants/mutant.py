"""What a mutant is."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault in a header: `old` occurs exactly `count` times in `file` (below include/deep_moe/), and is replaced by
    `new` everywhere. `survives` says why nothing can notice it, where that is so."""

    name: str
    file: str
    old: str
    new: str
    count: int = 1
    survives: str = ""
