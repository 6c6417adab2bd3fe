"""The kernels of products and of the operations between them.

In reading order:

- dependent_launch.py: programmatic dependent launch: a kernel starts while the one before it ends
- elementwise.py: kernels between the products of a block, in Triton
- gemv.py: the product of a weight with one row (GEMV), in Triton, with the operations around it
  fused in

May import: triton and torch.
"""
