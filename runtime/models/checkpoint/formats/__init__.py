"""How weights lie in storage: which bytes a stored matrix takes, and which of these bytes a part of
the matrix takes.

A `WeightFormat` gives shapes, bytes and cuts, so that planning, checking and loading need no table
of dtypes. A new format is one more file here that describes its planes, and one more line in the
registry.

In reading order:

- weight_format.py: a `WeightFormat`, made of `Plane`s, and the `ByteRuns` of a part
- dense.py: formats that keep each number by itself: float32, bfloat16, float16, float8
- registry.py: the formats there are, by name

May import: runtime/models/checkpoint/safetensors.py and the files of runtime/ itself.
"""
