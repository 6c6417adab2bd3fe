"""Kernels of the CPU in float32, compiled by numba when first used and kept on disk.

numba is imported here and nowhere else.

In reading order:

- numba_runtime.py: what all kernels share: compiling, threads, the cache
- gemm.py: products of activations with packed weights
- row_kernels.py: norms, gates and rotations, row by row
- decode_attention.py: attention of single tokens

May import: torch, numba, and the files of runtime/ itself.
"""
