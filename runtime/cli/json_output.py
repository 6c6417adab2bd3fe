"""The output of `--json`."""

import msgspec


def as_json(**fields: object) -> str:
    """Return the fields as one JSON object, on one line."""
    return msgspec.json.encode(fields).decode()
