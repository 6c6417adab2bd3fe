"""Attention on NVIDIA GPUs, over keys and values in pages. Scores and sums are in float32.

In reading order:

- place_heads.py: heads normed and rotated, keys and values written to their pages
- paged_decode.py: attention of one token a session, straight from the session's pages
- paged_prompt.py: attention of many tokens of a session, straight from its pages
- combine.py: the parts of a history that several programs attended to, put together

May import: torch, triton and the kernels of dense/.
"""
