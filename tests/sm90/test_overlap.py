"""Programmatic dependent launch: a layer starts while the `stage` before it ends."""

import pathlib
import subprocess
import sys


def test_layers_that_overlap_their_stage():
    """In a process of its own: the buffers of other tests keep launches apart."""
    script = pathlib.Path(__file__).with_name("overlapping_layers.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "have the same bits" in run.stdout, run.stdout + run.stderr
