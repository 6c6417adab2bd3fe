"""Rows handed from one process of a machine to another in memory that both map, so that devices
exchange them without their hosts.

A stage can begin a step before the stage before it has computed that step: its device waits for the
flag beside the rows. Rows that do not fit, or whose place is not free, travel as bytes.

In reading order:

- channel.py: an outlet that writes, an inlet that reads, and rows that a forward takes from there
- ring.py: the memory itself, its layout, and what a device is asked to do with it

May import: runtime/messages/header.py (where rows lie, as a stage tells the next one) and the files
of runtime/ itself. The device's part is passed in: compute/cuda/stream_flags.py on a GPU.
"""
