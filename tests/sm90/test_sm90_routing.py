"""CASES of tests/cases/routing.py on one Hopper GPU."""

from cases.routing import *  # noqa: F403
