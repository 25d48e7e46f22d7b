"""CASES of tests/cases/tracing.py on the emulator."""

import pytest
from cases.tracing import *  # noqa: F403


def test_a_launch_on_more_sms_than_the_array_has_room_for(worlds):
    """num_sms of the emulator may change after the buffer was made."""
    world = worlds("traced")
    with pytest.raises(ValueError, match="trace of a launch on 3 SMs needs .* bytes, but its array has"):
        world.call(world.inputs([1] * 4), num_sms=3)
