"""Attention on NVIDIA GPUs.

In reading order:

- paged_prompt.py: many tokens of a session at a time, straight from its pages
- combine.py: parts of a history, attended to by several programs, put together, in Triton
- paged_decode.py: attention of one token a session, in Triton, straight from the session's pages
- place_heads.py: heads made ready for attention, in Triton

May import: triton, torch and the kernels of dense/.
"""
