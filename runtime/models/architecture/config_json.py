"""A model's `config.json`, read key by key. Pure: imports no torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import has_model_file, read_model_file

CONFIG_BYTES_MAX: Final = 16 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Return the JSON object in `folder`/config.json. Errors: bad_model when the file is missing or
    no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(_config_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ZrtError("bad_model", f"{path} is not a JSON object")
    return config


def config_text(folder: Path) -> str:
    """Return the text of `folder`/config.json. Errors: bad_model, also for a text that is not
    UTF-8."""
    path = folder / "config.json"
    try:
        return _config_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ZrtError("bad_model", f"{path} is not JSON: {error}") from error


def _config_bytes(path: Path) -> bytes:
    if not has_model_file(path):
        raise ZrtError("bad_model", f"there is no {path}: a model folder holds config.json")
    return read_model_file(path, CONFIG_BYTES_MAX)


def parse_config(text: str) -> dict[str, Any]:
    """Return the JSON object of a config.json that came in a message. Errors: bad_model."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ZrtError("bad_model", f"config_json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ZrtError("bad_model", "config_json is not a JSON object")
    return config


class Keys:
    """Typed look-ups in a config, or in a table of it; every failure names the key.

    `absent` stands in for a missing key. `null` (where a look-up takes it) stands in for a null
    value, and for an `absent` of None.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def wrong(self, key: str, wanted: str) -> ZrtError:
        if key not in self.values:
            return ZrtError("bad_model", f"config.json: {self._prefix}{key} is missing; it must be {wanted}")
        return ZrtError("bad_model", f"config.json: {self._prefix}{key} is {self.values[key]!r}; it must be {wanted}")

    def unsupported(self, key: str, why: str) -> ZrtError:
        return ZrtError("unsupported", f"config.json: {self._prefix}{key} {self.values.get(key)!r} {why}")

    def size(self, key: str, absent: int | None = None, null: int | None = None, *, least: int = 1) -> int:
        """Return the whole number at `key`, at least `least`."""
        value = self.values.get(key, absent)
        if value is None:
            value = null
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number from {least} on")
        return value

    def size_or_none(self, key: str, absent: int | None) -> int | None:
        """Return the whole number at `key`, as `size` does, or None for null."""
        return None if self.values.get(key, absent) is None else self.size(key, absent)

    def number(self, key: str, absent: float | None = None, null: float | None = None, *, zero: bool = False) -> float:
        """Return the finite number at `key`: above 0, or from 0 on with `zero`."""
        value = self.values.get(key, absent)
        if value is None:
            value = null
        if not _is_number(value) or not 0 <= value < math.inf or (value == 0 and not zero):
            raise self.wrong(key, "a number from 0 on" if zero else "a number above 0")
        return float(value)

    def number_or_none(self, key: str, absent: float | None, *, zero: bool = False) -> float | None:
        """Return the number at `key`, as `number` does, or None for null."""
        return None if self.values.get(key, absent) is None else self.number(key, absent, zero=zero)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return the list at `key` of `length` numbers above 0."""
        values = self.values.get(key)
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(_is_number(value) and 0 < value < math.inf for value in values)
        ):
            raise self.wrong(key, f"a list of {length} numbers above 0")
        return tuple(float(value) for value in values)

    def flag(self, key: str, absent: bool = False) -> bool:
        value = self.values.get(key, absent)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def ids(self, key: str, absent: int | None) -> tuple[int, ...]:
        """Return the token ids at `key`: one, a list of them, or none for null."""
        value = self.values.get(key, absent)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
            raise self.wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def table(self, key: str) -> "Keys":
        """Return the object at `key`, empty where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Keys(value or {}, f"{self._prefix}{key}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
