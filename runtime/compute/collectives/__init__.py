"""The operations that the ranks of a tensor-parallel group do together: sums, gathering and
broadcast.

Each rank is a process of its own. A group on CPUs meets over gloo, one on GPUs over NCCL; both
implement the protocol `Collectives` of compute/decoder/tp_linear.py, so that the forward does not
know which.

In reading order:

- communicator.py: how a group meets, its operations, and gloo for ranks on CPUs
- nccl.py: NCCL for ranks on GPUs, through its own C interface

May import: runtime/compute/decoder/tp_linear.py and the files of runtime/ itself. nccl.py is
imported only where a GPU is asked for.
"""
