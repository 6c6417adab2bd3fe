"""Sums and gathers over the ranks of a tensor-parallel group.

In reading order:

- communicator.py: the group joined: gloo on CPUs, NCCL on CUDA devices
- nccl.py: NCCL's own C interface

May import: torch, runtime/compute/decoder/ and the files of runtime/ itself.
"""
