"""Forwards on NVIDIA GPUs: what the decoder does there otherwise than on a CPU.

A forward is told everything by one copy from the host, so that it can be captured as a CUDA graph
and replayed.

In reading order:

- gpu_decoder.py: the forward of one shard over a ragged batch
- inputs.py: what the host tells one forward, in one copy
- decode_graph.py: next tokens of several sessions, as a graph
- prompt_graph.py: batches with prompts in them, as a graph
- one_row.py: the products of one row, for plain models
- batch_sampler.py: drawing the tokens of a whole batch
- launch.py: the kernels as Python functions of tensors
- tuning.py: which shapes of a kernel suit a card
- stream_flags.py: words of host memory that a stream writes and awaits
- kernels/: the kernels themselves, in Triton

May import: runtime/compute/'s own files, decoder/, kv/ and shared_rows/, and runtime/models/.
"""
