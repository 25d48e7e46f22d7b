"""CASES of tests/cases/few.py on one Hopper GPU."""

from cases.few import *  # noqa: F403
