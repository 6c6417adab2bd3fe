"""A shard of a model and its forward, whatever the device: the parts of a block and the order in
which they compute. Imports no triton and no numba.

In reading order:
- decoder.py: the entrance to a shard: a turn checked, computed, and the cache kept consistent.
- block_stack.py: the order of embedding, blocks, norm and head.
- ops.py: what differs between devices there; compute/cpu and compute/cuda implement it.
- shard.py: the weights that one process holds.
- linear.py: linear layers.
- tp_linear.py: what a rank of a tensor-parallel group computes otherwise than a whole shard.
- rope.py: angles of positions.
- workspace.py: buffers that every block writes over.

Imports compute.cpu.gemm (linear.py), compute.kv, compute.shared_rows, compute.turn and models.
"""
