"""Processes of this machine: started, tied to their parents, watched, ended, logged.

No orphan outlives its parent: every edge has a death pipe and a parent-death signal.

In reading order:

- lifeline.py: the child's side: it holds on, and says when it is ready
- spawn.py: one child and every descriptor that ties it to us
- supervisor.py: children kept running, within a budget of restarts
- terminal.py: signals, standard streams, and readers that pause
- stderr.py: what a paused reader does not take is dropped
- logs.py: what processes log, and in which form
- runfiles.py: notes by which other commands find a cluster
- load_bars.py: progress bars of what loads, on stderr

May import: runtime/messages/ and the files of runtime/ itself. It knows no socket.
"""
