"""From the abort record that a kernel leaves (layout/buffer.h) to an exception."""

from .. import _C
from ..errors import DeepMoeError, MismatchError, PeerTimeout

# What a launch was waiting for, by WaitSite; {index} is the record's index.
PHASES = {
    _C.WaitSite.RouteCounts: "its own blocks to count their tokens (dispatch)",
    _C.WaitSite.CountFlag: "the row counts of rank {index} (dispatch)",
    _C.WaitSite.RingSlot: "a free ring slot for row block {index} (dispatch)",
    _C.WaitSite.RowsArrived: "the rows of row block {index} (L1)",
    _C.WaitSite.L1Done: "the activations of row block {index} (L2)",
    _C.WaitSite.DoneFlag: "the expert outputs of rank {index} (combine)",
    _C.WaitSite.DecodedChunk: "decoded weights in slot {index} (L1 or L2)",
    _C.WaitSite.DecodedSlot: "slot {index} to be free for decoded weights (L1 or L2)",
    _C.WaitSite.Pipeline: "barrier {index} inside a block, which is a defect of the kernel",
}
REMEDY = "the buffer cannot be used any more: destroy it on all ranks and create a new one"


def abort_error(record: int) -> DeepMoeError:
    """The exception for a record that is not 0; it names rank, peer or row block, and phase."""
    code, site, rank, index = record >> 56, record >> 48 & 0xFF, record >> 32 & 0xFFFF, record & 0xFFFFFFFF
    if code == int(_C.AbortCode.BoundMismatch):
        return MismatchError(
            f"the layer was called with a num_tokens_bound of another class on rank {index} than on rank {rank}; "
            f"num_tokens_bound must fall into the same class on all ranks; {REMEDY}"
        )
    try:
        phase = PHASES[_C.WaitSite(site)].format(index=index)
    except (KeyError, ValueError):
        phase = f"something unknown (record {record:#018x})"
    return PeerTimeout(f"mega_moe: rank {rank} waited too long for {phase}; {REMEDY}")
