"""Which release of zrt this is."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

SOURCE: Final = "0+source"
"""What a source tree says that is not installed."""


@cache
def release() -> str:
    try:
        return version("zrt")
    except PackageNotFoundError:
        return SOURCE
