"""CASES of tests/cases/activation.py on the emulator."""

from cases.activation import *  # noqa: F403
