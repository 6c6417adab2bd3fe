"""Foreign encodings that a typed decode does not cover, one module a system. None of them knows a
socket."""


class Undecodable(ValueError):
    """These bytes are not the message they should be; the text names the field and what belongs
    there."""
