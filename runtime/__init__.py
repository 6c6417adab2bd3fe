"""zrt's runtime. Scripts need `Client` and `ZrtError`."""

from zrt.runtime.client import Client
from zrt.runtime.errors import ZrtError

__all__ = ["Client", "ZrtError"]
