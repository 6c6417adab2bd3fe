"""The one decoder that every model family runs through, driven by the features of its `ModelSpec`.

In reading order:

- decoder.py: the forward of one shard over a ragged batch
- shard.py: the weights that one process holds
- linear.py: linear layers, chosen at load
- tp_linear.py: linear layers of a tensor-parallel rank
- attention.py: attention of a ragged batch, in place in the cache
- rope.py: rotary position embedding
- elementwise.py: norms and gates
- workspace.py: the buffers that every block writes over

May import: the other files of runtime/compute/, its cpu/ and kv/, and runtime/models/. Triton stays
in cuda/.
"""
