"""CASES of tests/cases/activation.py on one Hopper GPU."""

from cases.activation import *  # noqa: F403
