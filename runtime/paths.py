"""The folder of zrt's files on this machine, and paths as people write them."""

import os
from pathlib import Path

from zrt.runtime.errors import ZrtError


def home() -> Path:
    """Return zrt's cache folder: $ZRT_HOME, else ~/.cache/zrt. ZrtError bad_config: there is no
    home directory, and no ZRT_HOME."""
    if given := os.environ.get("ZRT_HOME"):
        return expanded(given)
    try:
        return expanded("~/.cache/zrt")
    except ZrtError:
        raise ZrtError("bad_config", "there is no home directory: set ZRT_HOME to a folder for zrt's files") from None


def expanded(path: str | Path) -> Path:
    """Return a path with its leading ~ or ~NAME replaced by that home directory. ZrtError
    bad_config: there is no such home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        whose = "HOME is not set and this user has none" if user == "~" else f"there is no user {user[1:]!r}"
        raise ZrtError("bad_config", f"{path}: {whose}; write the whole path in place of {user}") from None
