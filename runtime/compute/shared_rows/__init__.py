"""Rows that one process leaves for another of its machine, in memory that both map.

No bytes travel: a message, or a flag, says which place holds them.

In reading order:

- ring.py: the mapped memory: places for rows, a flag for each
- channel.py: rows written and read there by their devices

May import: torch, runtime/messages/ and the files of runtime/ itself.
"""
