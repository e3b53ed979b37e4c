"""Where evenshare keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$EVENSHARE_CACHE, or evenshare under $XDG_CACHE_HOME, or ~/.cache/evenshare."""
    if own := os.environ.get("EVENSHARE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "evenshare"
