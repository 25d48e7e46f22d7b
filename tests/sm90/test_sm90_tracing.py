"""CASES of tests/cases/tracing.py on one Hopper GPU."""

from cases.tracing import *  # noqa: F403
