"""How launches on the emulator run: a context variable with defaults."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from .. import _C

ARCHS = ("sm_90a",)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of emulated launches.

    seed: of the scheduler; the same seed and inputs give the same interleaving, as long as every rank calls in time.
    arch: which GPU is emulated.
    num_sms: CTAs of a rank that has no `num_sms` of its own; at least 2, so that they can be out of step.
    weak_memory: accesses that no release and acquire order, and missing proxy fences, are faults.
    async_effects: copies and wgmma take effect at a seeded later moment.
    host_wait_s: seconds to wait for a rank that does not launch, before the emulated clock runs into the time-outs.
    """

    seed: int = 0
    arch: str = "sm_90a"
    num_sms: int = 2
    weak_memory: bool = True
    async_effects: bool = True
    host_wait_s: float = 600.0

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch is {self.arch!r}; the emulator knows {', '.join(ARCHS)}")
        if self.num_sms < 1:
            raise ValueError(f"num_sms is {self.num_sms}; it must be at least 1")

    def native(self) -> _C.emu.Options:
        """What `_C.emu.World` takes."""
        return _C.emu.Options(
            seed=self.seed & (2**64 - 1),
            weak_memory=self.weak_memory,
            async_effects=self.async_effects,
            host_wait_s=self.host_wait_s,
        )


_DEFAULT = Options()
_current: contextvars.ContextVar[Options] = contextvars.ContextVar("deep_moe_emulator_options", default=_DEFAULT)


def current() -> Options:
    """The options in force in this context (threads of `LocalGroup.run` inherit their caller's)."""
    return _current.get()


@contextlib.contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Changes options for the calls inside the `with` block; the names are the fields of `Options`.

    Raises:
        TypeError: no such option.
        ValueError: a value is not allowed.
    """
    changed = dataclasses.replace(_current.get(), **changes)
    token = _current.set(changed)
    try:
        yield changed
    finally:
        _current.reset(token)
