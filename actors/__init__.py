"""The processes of a cluster, a room each, and the one place that starts them.

Each actor binds a mailbox, obeys messages, and never blocks its event loop. The pure parts of an
actor live in its room, beside the thin actor that uses them.

In reading order:

- main.py: the table of kinds, and how one comes to run from its options
- options.py: the options of each kind, and the command line that starts a child with them
- node/: `zrt up`: the parent of every process of a machine
- coordinator/: the one process that clients talk to: members, sessions, routes
- block_server/: a run of blocks at work for many sessions
- tp_rank/: one of the processes that a block server's blocks are split over
- layer_worker/: single layers, lent to a block server by another machine

May import: every room of runtime/ but cli/. `main.py` imports an actor's module only when that
kind is to run, or the coordinator would load torch; the module's `make(options)` returns the actor.
"""
