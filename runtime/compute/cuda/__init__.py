"""The forward of a shard on an NVIDIA GPU. triton is imported in this room alone, and the room is
imported only where a GPU is asked for.

In reading order:
- gpu_forward.py: one turn, which replays a graph or launches kernel by kernel.
- eager_forward.py: the kernels of a forward in their order; what graphs capture.
- decode_graph.py: the forward of several sessions' next tokens as a CUDA graph.
- prompt_graph.py: the blocks over a batch with prompts in it as a CUDA graph.
- inputs.py: what a forward is told by the host, in one copy.
- cuda_ops.py: the operations of a block on a GPU.
- dense_launch.py: kernels of products as Python functions of tensors.
- attention_launch.py: kernels of attention as Python functions of tensors.
- one_row.py: the products of one row, for models of the plain kind.
- tuning.py: which shapes of the one-row product suit a card.
- batch_sampler.py: tokens picked on the device.
- stream_flags.py: words of the host's memory that streams write and wait for.
- kernels/: the kernels themselves, in Triton's language.

Imports compute.decoder, compute.kv, compute.shared_rows and compute.turn.
"""
