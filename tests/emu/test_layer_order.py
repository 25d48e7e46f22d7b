"""CASES of tests/cases/order.py on the emulator."""

from cases.order import *  # noqa: F403
