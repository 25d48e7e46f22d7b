"""CASES of tests/cases/mxfp4.py on the emulator."""

from cases.mxfp4 import *  # noqa: F403
