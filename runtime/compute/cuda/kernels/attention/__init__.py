"""Attention kernels for NVIDIA GPUs, in Triton.

In reading order:

- place_heads.py: heads made ready for attention
- paged_decode.py: attention of one token a session, straight from the session's pages
- paged_prompt.py: attention of many tokens of a session at a time, straight from its pages
- combine.py: the parts of a history, attended to by several programs, put together

May import: triton, torch and the kernels of dense/.
"""
