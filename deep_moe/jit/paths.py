"""Where the package finds its device headers, its presets and its kernel cache: in a checkout and when installed."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def _data_dir(name: str) -> Path:
    """`name` inside the installed package, else beside the package (a checkout or an editable install)."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


_include_dir: Path | None = None  # what use_include_dir has set


def include_dir() -> Path:
    """The folder that holds `deep_moe/kernels/...` and every other device header."""
    return _include_dir or _data_dir("include")


def use_include_dir(path: Path | None) -> None:
    """Makes this process compile the device headers in `path`, for tests that change them; None: the package's own."""
    global _include_dir
    _include_dir = path


def presets_file() -> Path:
    """The model presets that `python -m deep_moe warmup` knows."""
    return _data_dir("jit_cache") / "presets.json"


def default_cache_root() -> Path | None:
    """`jit_cache/kernels` of a checkout, else `$XDG_CACHE_HOME/deep_moe` or `~/.cache/deep_moe`.

    None when there is no home directory (HOME is unset and the user has no entry in the password database).
    """
    checkout = PACKAGE.parent
    if (checkout / "jit_cache").is_dir() and (checkout / "include" / "deep_moe").is_dir():
        return checkout / "jit_cache" / "kernels"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "deep_moe"
    home = os.path.expanduser("~")
    return None if home in ("~", "/") else Path(home) / ".cache" / "deep_moe"
