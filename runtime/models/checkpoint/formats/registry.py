"""The registry of weight formats, by name."""

from collections.abc import Mapping
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.checkpoint.formats.dense import DENSE
from zrt.runtime.models.checkpoint.formats.weight_format import WeightFormat

FORMATS: Final[Mapping[str, WeightFormat]] = {dense.name: dense for dense in DENSE.values()}


def format_of(name: str) -> WeightFormat:
    """Return the format called `name`, such as "bfloat16". ZrtError unsupported names the formats
    there are."""
    if name not in FORMATS:
        raise ZrtError("unsupported", f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number of a dtype that is computed in: of activations, keys and
    values."""
    return format_of(dtype).nbytes((1, 1))
