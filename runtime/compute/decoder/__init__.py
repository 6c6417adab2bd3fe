"""A shard of a model and its forward, whatever the device: what blocks consist of and in which
order they compute. Imports no triton and no numba.

In reading order:
- decoder.py: the one door of a shard: a turn checked, computed, and the cache kept true.
- block_stack.py: the one order of embedding, blocks, norm and head.
- ops.py: what differs between devices there; compute/cpu and compute/cuda implement it.
- shard.py, linear.py, tp_linear.py: weights, and the products with them.
- rope.py: angles of positions.
- workspace.py: buffers that every block writes over.
- linear.py: linear layers
- shard.py: the weights one process holds
- tp_linear.py: what a rank of a tensor-parallel group computes otherwise than a whole shard

Imports compute.cpu.gemm (linear.py), compute.kv, compute.shared_rows, compute.turn and models.
"""
