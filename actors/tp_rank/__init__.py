"""A tensor-parallel rank: one of the processes that a block server's blocks are split over.

Its leader tells it what to do, one request with one response each. Anybody may do so with bare JSON
frames.

In reading order:

- tp_rank.py: the actor, made from its options: a mailbox in front of one executor
- rank.py: what a rank does with each request; every call blocks

May import: runtime/ and actors/options.py; no other actor's room.
"""
