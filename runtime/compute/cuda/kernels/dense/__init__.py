"""What the kernels of products share.

In reading order:

- dependent_launch.py: programmatic dependent launch: a kernel starts while the one before it ends

May import: triton and torch.
"""
