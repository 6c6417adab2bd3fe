"""A shard of a model and its forward, whatever the device: what blocks consist of and in which
order they compute. Imports neither triton nor numba.

In reading order:

- decoder.py: the one door of a shard: a turn checked, computed, and the cache kept true
- block_stack.py: the one order of embedding, blocks, norm and head
- ops.py: what differs between devices in a block; compute/cpu/ and compute/cuda/ implement it
- shard.py: the weights that one process holds
- linear.py: linear layers, chosen at load by how their weights are kept
- tp_linear.py: the products that a rank of a tensor-parallel group sums or gathers
- rope.py: the angles of positions
- workspace.py: buffers that every block writes over, and the views of them

May import: runtime/models/ and the files of runtime/ itself; of runtime/compute/ only kv/,
shared_rows/, turn.py, tensors.py, weight_sources.py, cpu/gemm.py and cpu/numba_runtime.py.
"""
