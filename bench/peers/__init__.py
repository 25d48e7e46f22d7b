"""Public competitors. Each module has a `Peer` class with the interface below; importing this package imports none.

Peer(shape, ranks, weights, max_tokens)   weights of this rank's experts, natural layout; raises Unsupported
version          text for the report
max_tokens       rows with more tokens per rank are timed without it; at most the constructor's
stage(staged)    copy a `reference.Staged` of this rank into its buffer
call(y)          one layer, asynchronous; the first call with a y and number of tokens may take long, and is not timed
close()
"""

import importlib

PEERS = {"sgl": "peers.sgl", "chain": "peers.chain"}


class Unsupported(Exception):
    """Raised by a `Peer` that does not run this shape on so many ranks; the text says why."""


def load(name: str):
    """The `Peer` class called `name`; SystemExit that says what is missing."""
    if name not in PEERS:
        raise SystemExit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    try:
        return importlib.import_module(PEERS[name]).Peer
    except ImportError as error:
        raise SystemExit(f"peer {name} cannot be imported: {error}") from error
