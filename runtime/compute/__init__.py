"""Tensors: a shard's weights, its cache, its forward and its sampling.

Knows no socket, no task and no process.

The files and rooms:

- loading.py: makes an engine, from a model's files or with random weights
- weight_sources.py: weights read by byte range, or drawn from a config alone
- engine.py: a loaded shard at work, as an executor runs it
- turn.py: the orders of a turn, and its results
- decoder/: the forward of a shard, whatever the device
- cpu/: the forward on a CPU, with numba's kernels
- cuda/: the forward on an NVIDIA GPU, with Triton's kernels
- kv/: the KV cache
- sampler.py: the next token, picked from logits
- collectives/: what the ranks of a tensor-parallel group do together
- shared_rows/: rows handed from process to process in memory that both map
- layer_engine.py: the layers that a layer worker holds, and what its executor does with them
- layer_time.py: the time that one block of a model takes on a device
- tensors.py: tensors as bytes on the wire
- devices.py: the devices of this machine, and the memory of each
- threads.py: how many CPU threads compute, and how long an idle one spins
- thread_tuner.py: how many of them a turn of decodes runs on

May import: runtime/models/, messages/ (what a turn is told and tells, what an engine is to hold,
tensors) and the files of runtime/ itself. cuda/ is imported only where a GPU is asked for.
"""
