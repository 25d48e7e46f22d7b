"""Public competitors. Each module has a `Peer` class with the interface below; importing this package imports none.

Peer(shape, ranks, weights, max_tokens)   weights of this rank's experts, natural layout
version          text for the report
stage(staged)    copy a `reference.Staged` of this rank into its buffer
call(y)          one layer, asynchronous
close()
"""

import importlib

PEERS = {"sgl": "peers.sgl"}


def load(name: str):
    """The `Peer` class called `name`; SystemExit that says what is missing."""
    if name not in PEERS:
        raise SystemExit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    try:
        return importlib.import_module(PEERS[name]).Peer
    except ImportError as error:
        raise SystemExit(f"peer {name} cannot be imported: {error}") from error
