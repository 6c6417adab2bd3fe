"""Foreign encodings that a typed decode does not cover, one module a system. None of them knows a
socket.

In reading order:

- msgpack_walker.py: a MessagePack reader that goes value by value
- kwaai.py: KwaaiNet's two messages as MessagePack
- helexa.py: helexa's messages as JSON
- cake.py: Cake's own frames, for native peers

May import: runtime/messages/.
"""


class Undecodable(ValueError):
    """These bytes are not the message they should be; the text names the field and what belongs
    there."""
