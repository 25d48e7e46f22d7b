"""What ptxas says about a kernel: registers, spills, stack (local memory) and WGMMA-serialisation warnings."""

import re

_REGISTERS = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# C75xx: "wgmma.mma_async instructions are serialized due to ..."; printed as info or warning.
_WARNING = re.compile(r"^.*(?:\(C75\d\d\)|\bwarning\b).*$", re.M | re.I)


def parse_ptxas(log: str) -> dict:
    """The `-Xptxas -v` log as {registers, stack, spill_stores, spill_loads (bytes per thread), warnings (lines)}.

    Of several functions (a call that was not inlined) the largest value of each counts; None where ptxas said nothing.
    """
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(log)]
    stack, spill_stores, spill_loads = map(max, zip(*frames, strict=True)) if frames else (None, None, None)
    return {
        "registers": max(map(int, _REGISTERS.findall(log)), default=None),
        "stack": stack,
        "spill_stores": spill_stores,
        "spill_loads": spill_loads,
        "warnings": [line.strip() for line in _WARNING.findall(log)],
    }


def complaints(report: dict) -> list[str]:
    """What a released kernel must not have, as sentences; empty for a clean kernel."""
    names = {"stack": "stack frame", "spill_stores": "spill stores", "spill_loads": "spill loads"}
    found = [f"{report[name]} bytes of {words}" for name, words in names.items() if report[name] != 0]
    return found + list(report["warnings"])
