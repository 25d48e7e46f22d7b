"""CASES of tests/cases/buffers.py on one Hopper GPU."""

from cases.buffers import *  # noqa: F403
