"""Names the folder that caches measured costs and compiled C++ of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$FXPREC_CACHE_DIR``, else ``$XDG_CACHE_HOME/fxprec``, else ``~/.cache/fxprec``."""
    own, general = os.environ.get("FXPREC_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(general or Path.home() / ".cache") / "fxprec"
