"""CASES of tests/cases/shapes.py on one Hopper GPU."""

from cases.shapes import *  # noqa: F403
