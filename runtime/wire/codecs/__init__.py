"""Foreign encodings that a typed decode does not cover, one module a system. No sockets.

In reading order:

- msgpack_walker.py: a MessagePack reader that goes value by value
- kwaai.py: KwaaiNet's two messages as MessagePack
- helexa.py: helexa's messages as JSON
- cake.py: Cake's own frames, for native peers

May import: runtime/messages/.
"""


class Undecodable(ValueError):
    """The error for bytes that are not the expected message; the text names the field and what
    belongs there."""
