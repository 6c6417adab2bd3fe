"""Rows and products on NVIDIA GPUs, computed in float32 and rounded once.

In reading order:

- dependent_launch.py: programmatic dependent launch: a kernel starts while the one before it ends
- gemv.py: the product of a weight with one row (GEMV), with what stands around it fused in
- elementwise.py: RMSNorm of rows, and the MLP's gate

May import: torch and triton.
"""
