"""Tensors: a model's weights, caches, forward and sampling. Knows no socket, no actor and no wire.

In reading order:

- turn.py: what a turn is asked to do, and what it gives
- engine.py: a loaded shard at work: what an executor runs
- loading.py: engines as they are made, from files or at random
- weight_sources.py: where weights come from
- tensors.py: tensors as bytes, and back
- sampler.py: choosing the next token from logits
- layer_engine.py: the layers that a layer worker holds
- layer_time.py: how long one block takes on a device, measured
- devices.py: devices, and the memory of each
- threads.py: CPU threads of a process that computes
- thread_tuner.py: how many threads a turn of decodes runs on
- decoder/: the forward of a shard
- kv/: KV memory, in pages
- cpu/: kernels of the CPU, compiled by numba
- cuda/: forwards, graphs and kernels of NVIDIA GPUs
- collectives/: sums and gathers over the ranks of a group
- shared_rows/: rows handed over in memory between processes

May import: runtime/models/, messages/ and the files of runtime/ itself.
"""
