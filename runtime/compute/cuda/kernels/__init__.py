"""Kernels in Triton's language: nothing but functions on the device.

The room above launches them and chooses grids and launch parameters.

In reading order:

- dense/: norms, gate and products of one row, and how a kernel starts before the last one ends
- attention/: heads placed in the KV pages, then attention over the pages, of tokens and of prompts
- sampling/: the greatest logit, or the token that is drawn
- host_copy.py: rows copied to memory of the host, and from there

May import: torch, triton and other kernels, the last by name (`from … import wait`): a kernel
cannot look up an attribute of a module.
"""
