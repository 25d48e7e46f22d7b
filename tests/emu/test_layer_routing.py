"""CASES of tests/cases/routing.py on the emulator."""

from cases.routing import *  # noqa: F403
