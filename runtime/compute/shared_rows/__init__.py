"""Rows handed from one process of a machine to another in memory that both map, so that devices
exchange them without their hosts.

In reading order:
- channel.py: an outlet that writes, an inlet that reads, and rows that a forward takes from there.
- ring.py: the memory itself, its layout, and what a device is asked to do with it.

Imports messages.header (where rows lie, as a stage tells the next one), and compute.cuda where a
GPU is asked for.
"""
