"""The forward of a shard on a CPU.

numba is imported in this room alone. A module of kernels compiles them, or reads them from disk,
when it is imported. Kernels take float32; for other dtypes torch's own operations do the work.

In reading order:

- cpu_forward.py: one turn, from token ids or hidden states to hidden states or logits
- cpu_ops.py: norms, gate and rotation between the products of a block
- ragged_attention.py: attention of a batch whose sessions lie in the slab of a `SlabKVCache`
- numba_runtime.py: how kernels are compiled, kept and run on torch's threads
- gemm.py: products of activations with packed weights, float32
- row_kernels.py: norms, rotation and gate in one pass over the rows each, float32
- decode_attention.py: attention of single tokens, float32

May import: runtime/compute/decoder/, kv/, shared_rows/ and turn.py, and the files of runtime/
itself. decoder/linear.py imports gemm.py in turn, so gemm.py and numba_runtime.py import none of
these.
"""
