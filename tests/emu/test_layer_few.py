"""CASES of tests/cases/few.py on the emulator."""

from cases.few import *  # noqa: F403
