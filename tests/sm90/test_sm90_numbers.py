"""CASES of tests/cases/numbers.py on one Hopper GPU."""

from cases.numbers import *  # noqa: F403
