"""Kernels of NVIDIA GPUs, in Triton. Each computes in float32 and rounds its result once.

`launch.py` in the room above calls them with shapes and launch parameters.

In reading order:

- triton_kernels.py: the decoder's kernels: products, norms, decode attention
- host_copy.py: rows to and from memory of the host
- dense/: what products share
- attention/: attention of prompts
- sampling/: cutting off and drawing from logits

May import: triton, torch, and each other.
"""
