"""What a mutant is."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault in a header: `old` occurs exactly `count` times in `file` (below include/deep_moe/), and is replaced by
    `new` everywhere. Where only some of the mutation test's cases can notice it, `cases` is in their names, and the
    others are not run. `survives` says why nothing can notice it, where that is so."""

    name: str
    file: str
    old: str
    new: str
    count: int = 1
    survives: str = ""
    cases: str = ""
