"""CASES of tests/cases/buffers.py on the emulator."""

from cases.buffers import *  # noqa: F403
