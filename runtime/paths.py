"""The folder of zrt's files on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """Return zrt's cache folder: $ZRT_HOME, else ~/.cache/zrt."""
    return Path(os.environ.get("ZRT_HOME") or "~/.cache/zrt").expanduser()
