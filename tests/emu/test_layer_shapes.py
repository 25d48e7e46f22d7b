"""CASES of tests/cases/shapes.py on the emulator."""

from cases.shapes import *  # noqa: F403
