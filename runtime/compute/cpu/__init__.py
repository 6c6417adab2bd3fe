"""The forward of a shard on a CPU. numba is imported in this room alone, and compiles or reads its
kernels when a module of them is imported.

In reading order:
- cpu_forward.py: one turn, from token ids or hidden states to hidden states or logits.
- cpu_ops.py: norms, gate and rotation between the products of a block.
- ragged_attention.py: attention of a batch whose sessions lie in the slab of a SlabKVCache.
- row_kernels.py, gemm.py, decode_attention.py: float32 kernels.
- numba_runtime.py: how kernels are compiled, kept and run on torch's threads.
- decode_attention.py: attention of single tokens on the CPU, float32; the tests compare it with flo
- gemm.py: products of activations with packed weights on the CPU, float32
- row_kernels.py: what happens between two products, row by row, on the CPU in float32: each a pass

Imports compute.decoder, compute.kv and compute.turn; compute.decoder.linear alone imports a module
of this room (gemm.py), and never a module that imports it.
"""
