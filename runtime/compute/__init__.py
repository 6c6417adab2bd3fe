"""The computation of a shard: its weights, its KV cache, its forward and its sampling. Knows no
socket, no task and no process; of the protocol it knows what a turn is told and tells
(messages.sampling, messages.header), what an engine is to hold (messages.members), and tensors
(messages.layers).

In reading order: loading.py makes an engine, engine.py runs its turns (turn.py), decoder/ is the
forward, cpu/ and cuda/ are its devices, kv/ the cache, sampler.py picks tokens; collectives/ joins
the ranks of a group, shared_rows/ hands rows from process to process.

triton is imported in cuda/ alone, a room that is imported only where a GPU is asked for, and numba
in cpu/ alone. Imports models, messages and the files of runtime/ itself.

The files and rooms:

- collectives/: what the ranks of a tensor-parallel group do together
- cpu/: the forward of a shard on a CPU
- cuda/: the forward of a shard on an NVIDIA GPU
- decoder/: a shard of a model and its forward, whatever the device
- devices.py: the devices of this machine, and the memory of each
- engine.py: a loaded shard at work, as the executor of a block server runs it
- kv/: KV memory
- layer_engine.py: the layers that a layer worker holds, and what its executor does with them
- layer_time.py: the time that one block of a model takes on a device
- loading.py: the loading of engines
- sampler.py: the choice of the next token from logits
- shared_rows/: rows handed from one process of a machine to another in memory that both map
- tensors.py: tensors as bytes on the wire
- thread_tuner.py: the number of threads that a turn of decodes runs on
- threads.py: the CPU threads of a process that computes
- turn.py: the orders of a turn, and its results
- weight_sources.py: sources of weights

May import: as the room above.
"""
