"""The model presets of jit_cache/presets.json."""

import json
from dataclasses import dataclass, field
from typing import Any

from ..jit.paths import presets_file


@dataclass(frozen=True)
class Preset:
    """A model whose expert layers deep_moe can run. arguments: those of `deep_moe.Problem`."""

    name: str
    arguments: dict[str, Any]
    aliases: tuple[str, ...] = ()
    note: str = ""

    def problem(self, max_tokens_per_rank: int = 8192):
        """The `deep_moe.Problem` of this model."""
        from ..config import Problem

        return Problem(**self.arguments, max_tokens_per_rank=max_tokens_per_rank)


@dataclass(frozen=True)
class Presets:
    """All known models. refused: name -> why this version cannot run it."""

    models: list[Preset]
    refused: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Preset:
        """The preset called `name`, or with that alias; ValueError with the reason or the list of names."""
        wanted = name.lower()
        for preset in self.models:
            if wanted in (preset.name, *preset.aliases):
                return preset
        if wanted in self.refused:
            raise ValueError(f"model {wanted} is not supported: {self.refused[wanted]}")
        raise ValueError(f"model is {name!r}; allowed: {', '.join(preset.name for preset in self.models)}")


def load_presets() -> Presets:
    """Reads jit_cache/presets.json."""
    content = json.loads(presets_file().read_text(encoding="utf-8"))
    models = []
    for entry in content["models"]:
        name, aliases, note = entry.pop("name"), entry.pop("aliases", ()), entry.pop("note", "")
        models.append(Preset(name, entry, tuple(aliases), note))
    return Presets(models, {entry["name"]: entry["reason"] for entry in content["refused"]})
