"""`zrt up` as an actor: the parent of all processes of its machine.

It starts the coordinator first, then block servers, spares and layer workers, restarts what dies
within a budget, tells the coordinator of each death, and leaves nothing behind.

In reading order:

- node.py: the actor: start, serve, watch, end
- console.py: what `zrt up` says on stderr
- command_lines.py: the command line and environment of each child
- process_losses.py: what the death of a child means for the cluster
- departure.py: how a cluster comes to its end
- absentees.py: children that are up, and yet not with the coordinator
- recovery_report.py: what came back after a loss, and after how long

May import: actors/options.py and runtime/, except runtime/cli/ and what loads torch. The question
that `zrt up` asks of a ready cluster is passed in.
"""
