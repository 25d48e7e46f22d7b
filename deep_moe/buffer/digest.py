"""What must be equal on all ranks of a buffer, and the comparison."""

from typing import Any

from .. import _C
from ..config import Problem
from ..errors import MismatchError
from ..version import __version__
from .collective import Collective

Digest = dict[str, Any]


def digest_of(problem: Problem, configs: "list[_C.Config]", device_type: str) -> Digest:
    """Facts by the name that an error message uses."""
    config = configs[0]
    return {
        **problem.facts(),
        "number of ranks": config.num_ranks,
        "bound classes": problem.bound_classes(config.num_ranks),
        "buffer bytes": _C.buffer_bytes(config),
        "buffer layout": f"{_C.buffer_layout_hash(config):016x}",
        "device type": device_type,
        "deep_moe version": __version__,
    }


def compare(collective: Collective, digest: Digest) -> None:
    """Collective: MismatchError on every rank, with the same text, when two ranks differ."""
    digests = collective.all_gather(digest)
    differences = []
    for name in digests[0]:
        for rank, other in enumerate(digests):
            if other.get(name) != digests[0][name]:
                differences.append(f"{name} is {digests[0][name]!r} on rank 0 but {other.get(name)!r} on rank {rank}")
                break
    if differences:
        raise MismatchError(
            f"the ranks do not describe the same SymmBuffer: {'; '.join(differences)}; "
            "create it with the same problem and the same deep_moe on every rank"
        )
