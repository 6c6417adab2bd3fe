"""The operations that the ranks of a tensor-parallel group do together: sums, gathering and
broadcast.

In reading order:
- communicator.py: how a group meets, its operations, and gloo for ranks on CPUs.
- nccl.py: NCCL for ranks on GPUs, through its own C interface, imported where a GPU is asked for.

Imports compute.decoder.tp_linear, whose protocol `Collectives` the communicators implement.
"""
