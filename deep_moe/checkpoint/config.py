"""How many experts a layer is to have: by the caller's word, else by the model's config.json."""

import json
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.json"
# As their configurations have it: DeepSeek and Kimi K2; gpt-oss; Kimi Linear and Qwen3.
KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
NESTED = "text_config"  # where a model has other parts too, such as one for images


@dataclass(frozen=True)
class Expected:
    """number: of experts in each layer. source: who says so."""

    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.source} {self.number}"


def expected_experts(directory: Path, given: int | None) -> Expected | None:
    """What `given` says, or the config.json of the folder; None where neither tells.

    Raises:
        ValueError: `given` is no positive integer, or config.json cannot be read.
    """
    if given is not None:
        if not is_integer(given) or given < 1:
            raise ValueError(f"num_experts is {given!r}; it must be a positive integer, or None to go by {CONFIG}")
        return Expected(int(given), "num_experts is")
    path = directory / CONFIG
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_bytes())
        parts = [part for part in (config, config.get(NESTED)) if isinstance(part, dict)]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): download it again, or pass num_experts=") from error
    found = {part[key]: key for part in parts for key in KEYS if is_integer(part.get(key)) and part[key] > 0}
    if len(found) != 1:  # not in there, or not the same for all of the model
        return None
    ((number, key),) = found.items()
    return Expected(number, f"{path} has {key}")


def is_integer(value: Any) -> bool:
    """Also numpy's; but True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
