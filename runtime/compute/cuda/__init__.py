"""The forward of a shard on an NVIDIA GPU.

triton is imported in this room alone, and this room only where a GPU is asked for.

In reading order:

- gpu_forward.py: one turn, which replays a graph or launches kernel by kernel
- inputs.py: what a forward is told by the host, in one copy
- eager_forward.py: the kernels of a forward in their order, launched or captured
- cuda_ops.py: the operations between the products of a block
- dense_launch.py: launches of the kernels of rows and products
- attention_launch.py: launches of the kernels of attention
- one_row_products.py: the products of one row, for models of the plain kind
- tuning.py: which shapes of the one-row product suit a card
- decode_graph.py: a CUDA graph of several sessions' next tokens
- prompt_graph.py: a CUDA graph of the blocks over a batch with prompts in it
- batch_sampler.py: the tokens of a batch, picked on the device
- stream_flags.py: words of the host's memory that streams write and wait for
- kernels/: the kernels themselves, in Triton's language

May import: runtime/compute/decoder/, kv/, shared_rows/, turn.py and sampler.py,
runtime/models/architecture/, and the files of runtime/ itself.
"""
