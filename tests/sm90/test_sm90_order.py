"""CASES of tests/cases/order.py on one Hopper GPU."""

from cases.order import *  # noqa: F403
