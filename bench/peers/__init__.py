"""Public competitors. Each module has a `Peer` class with the interface below; importing this package imports none.

Peer(shape, ranks, weights, max_tokens)   weights of this rank's experts, natural layout; raises Unsupported
version          text for the report
max_tokens       rows with more tokens per rank are timed without it; at most the constructor's
stage(staged)    copy a `reference.Staged` of this rank into its buffer
call(y)          one layer, asynchronous; the first call with a y and number of tokens may take long, and is not timed
close()

A peer that runs a part of the layer only has no result to compare with ours. It leaves y alone and has, in addition:

part             text for the report: which part
part_error()     relative Frobenius error of what the last call computed, against the same operands in float64
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple


class Entry(NamedTuple):
    """Where a peer is, and the one mma_type that it has weights for."""

    module: str
    mma_type: str
    attribute: str = "Peer"


PEERS = {
    "sgl": Entry("peers.sgl", "fp8xfp8"),
    "chain": Entry("peers.chain", "fp8xfp8"),
    "humming": Entry("peers.humming", "fp8xmxfp4"),
    "humming-128": Entry("peers.humming", "fp8xmxfp4", "PeerPer128"),
}


class Unsupported(Exception):
    """Raised by a `Peer` that does not run this shape on so many ranks; the text says why."""


def load(name: str) -> Callable:
    """What makes the peer called `name`, with the arguments of `Peer`; SystemExit that says what is missing, there too.

    It raises Unsupported for shapes of another mma_type, for which the peer need not be installed.
    """
    if name not in PEERS:
        raise SystemExit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    return functools.partial(_make, name)


def _make(name: str, shape, *args):
    module, mma_type, attribute = PEERS[name]
    if shape.mma_type != mma_type:
        raise Unsupported(f"it runs {mma_type}, not {shape.mma_type}")
    try:
        peer = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise SystemExit(f"peer {name} cannot be imported: {error}") from error
    return peer(shape, *args)
