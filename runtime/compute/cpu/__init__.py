"""The forward of a shard on a CPU. numba is imported in this room alone, and compiles or reads its
kernels when a module of them is imported.

In reading order:
- cpu_forward.py: one turn, from token ids or hidden states to hidden states or logits.
- cpu_ops.py: norms, gate and rotation between the products of a block.
- ragged_attention.py: attention of a batch whose sessions lie in the slab of a SlabKVCache.
- decode_attention.py: attention of single tokens, float32.
- gemm.py: products of activations with packed weights, float32.
- row_kernels.py: the work between two products, row by row, float32.
- numba_runtime.py: how kernels are compiled, kept and run on torch's threads.

Imports compute.decoder, compute.kv and compute.turn; compute.decoder.linear alone imports a module
of this room (gemm.py), and never a module that imports it.
"""
