"""What the kernels of products share.

In reading order:

- dependent_launch.py: programmatic dependent launch: a kernel starts while the one before it ends
- elementwise.py: kernels between the products of a block, in Triton
- gemv.py: the product of a weight with one row (GEMV), in Triton, with what stands around it fused

May import: triton and torch.
"""
