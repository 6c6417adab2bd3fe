"""The release of zrt that runs."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

SOURCE: Final = "0+source"
"""The release of a source tree that is not installed."""


@cache
def release() -> str:
    try:
        return version("zrt")
    except PackageNotFoundError:
        return SOURCE
