"""Formats that store each number by itself, in row-major order; they can be cut anywhere."""

from collections.abc import Mapping
from typing import Final

from zrt.runtime.models.checkpoint.formats.weight_format import Plane, WeightFormat

FLOAT32: Final = WeightFormat("float32", (Plane("F32"),))
BFLOAT16: Final = WeightFormat("bfloat16", (Plane("BF16"),))
FLOAT16: Final = WeightFormat("float16", (Plane("F16"),))
FLOAT8_E4M3: Final = WeightFormat("float8_e4m3fn", (Plane("F8_E4M3"),))
FLOAT8_E5M2: Final = WeightFormat("float8_e5m2", (Plane("F8_E5M2"),))

DENSE: Final[Mapping[str, WeightFormat]] = {
    dense.planes[0].dtype: dense for dense in (FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2)
}
"""Dense formats by the dtype of their only tensor in a safetensors file. Their names are those of
torch's dtypes."""
