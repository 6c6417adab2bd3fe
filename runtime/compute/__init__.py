"""Tensors: a shard's weights, its cache, its forward and its sampling. Knows no socket, no task and
no process; of the protocol it knows what a turn is told and tells (messages.sampling,
messages.header), what an engine is to hold (messages.members), and tensors (messages.layers).

In reading order: loading.py makes an engine, engine.py runs its turns (turn.py), decoder/ is the
forward, cpu/ and cuda/ are its devices, kv/ the cache, sampler.py picks tokens; collectives/ joins
the ranks of a group, shared_rows/ hands rows from process to process.

triton is imported in cuda/ alone, which nobody imports but where a GPU is asked for, and numba in
cpu/ alone. Imports models, messages and the files of runtime/ itself.
"""
