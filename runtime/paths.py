"""Where zrt keeps what it keeps on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """Return the cache folder: $ZRT_HOME, else ~/.cache/zrt."""
    return Path(os.environ.get("ZRT_HOME") or "~/.cache/zrt").expanduser()
