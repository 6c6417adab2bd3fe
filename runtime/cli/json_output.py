"""What `--json` prints."""

import msgspec


def as_json(**fields: object) -> str:
    """Return one JSON object, in one line."""
    return msgspec.json.encode(fields).decode()
