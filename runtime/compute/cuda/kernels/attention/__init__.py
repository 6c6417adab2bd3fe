"""Attention on NVIDIA GPUs.

In reading order:

- paged_prompt.py: many tokens of a session at a time, straight from its pages

May import: triton, torch and the kernels of dense/.
"""
