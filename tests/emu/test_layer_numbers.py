"""CASES of tests/cases/numbers.py on the emulator."""

from cases.numbers import *  # noqa: F403
