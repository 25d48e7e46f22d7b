"""Kernel requests and the short translation units they become."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import JitError


class Entry(NamedTuple):
    """The header of a kernel and the macro in it that instantiates the kernel for a configuration."""

    header: str
    macro: str


_STAGE = Entry("deep_moe/kernels/stage.cuh", "DM_DEFINE_STAGE_KERNEL")
_SM90 = {"mega": Entry("deep_moe/kernels/sm90_fp8.cuh", "DM_DEFINE_MEGA_KERNEL"), "stage": _STAGE}
# The emulator runs the SM90 kernels, compiled by g++. SM100 has a compile path but no kernels yet.
ENTRIES: dict[str, dict[str, Entry]] = {"sm_90a": _SM90, "emulator": _SM90, "sm_100a": {}}
ARCHES = tuple(ENTRIES)
KINDS = ("mega", "stage")

# Fields of the configuration that only the mega kernel depends on.
VARIANT_FIELDS = ("bound_class", "block_m", "lag_blocks", "unit_blocks", "trace_events")


@dataclass(frozen=True)
class KernelRequest:
    """One kernel: `config` is a `_C.Config`, `kind` one of KINDS, `arch` one of ARCHES."""

    config: Any
    kind: str
    arch: str

    def entry(self) -> Entry:
        """ValueError for an unknown kind or arch, JitError where there is no kernel."""
        if self.arch not in ARCHES:
            raise ValueError(f"arch is {self.arch!r}; allowed: {', '.join(ARCHES)}")
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; allowed: {', '.join(KINDS)}")
        if self.kind not in ENTRIES[self.arch]:
            have = ", ".join(arch for arch, kinds in ENTRIES.items() if self.kind in kinds)
            raise JitError(f"there is no {self.kind} kernel for {self.arch} yet; this version has it for {have}")
        return ENTRIES[self.arch][self.kind]

    def render(self) -> str:
        """The text of the translation unit."""
        entry = self.entry()
        config = stage_config(self.config) if self.kind == "stage" else self.config
        return f'#include "{entry.header}"\n{entry.macro}(({config.literal()}))\n'


def stage_config(config: Any) -> Any:
    """`config` with its variant fields at their defaults, so that all variants of a buffer share one stage kernel."""
    if not hasattr(config, "replace"):
        return config
    defaults = type(config)()
    return config.replace(**{name: getattr(defaults, name) for name in VARIANT_FIELDS})
