"""The folder of zrt's files on this machine, and paths as people write them."""

import os
from pathlib import Path

from zrt.runtime.errors import ZrtError


def home() -> Path:
    """Return zrt's cache folder: $ZRT_HOME, else ~/.cache/zrt. ZrtError bad_config: there is no
    home directory, and no ZRT_HOME."""
    given = os.environ.get("ZRT_HOME")
    try:
        return expanded(given or "~/.cache/zrt")
    except ZrtError as error:
        unset = "there is no home directory" if not given else f"ZRT_HOME is {error.message}"
        raise ZrtError("bad_config", f"{unset}: set ZRT_HOME to a folder for zrt's files") from None


def expanded(path: str | Path) -> Path:
    """Return a path with its leading ~ or ~NAME replaced by that home directory. ZrtError
    bad_config: there is no such home directory."""
    found = os.path.expanduser(path)
    if str(found).startswith("~"):
        user = Path(path).parts[0]
        whose = "HOME is not set, and this user has none" if user == "~" else f"no user is called {user[1:]}"
        raise ZrtError("bad_config", f"{path}, but {whose}; write the whole path in place of {user}")
    return Path(found)
