"""CASES of tests/cases/mxfp4.py on one Hopper GPU."""

from cases.mxfp4 import *  # noqa: F403
