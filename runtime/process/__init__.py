"""Processes of this machine: started, tied to their parents, watched, ended, logged.

No child outlives its parent: a death pipe and a parent-death signal tie it to the parent.

In reading order:

- lifeline.py: the child's side: tied to its parent, it reports when it is ready
- python_command.py: the command, folder and environment of a child that runs Python
- tied.py: any module as such a child
- spawn.py: one child and the descriptors that tie it to us
- supervisor.py: children kept running, within a budget of restarts
- terminal.py: signals, standard streams, and readers that pause
- stdout.py: stdout whose failures are told from all others
- stderr.py: stderr whose writes do not wait for a paused reader
- logs.py: what processes log, and in which form
- runfiles.py: notes by which other commands find a cluster
- load_bars.py: progress bars of what loads, on stderr

May import: runtime/messages/ and the files of runtime/ itself. No sockets here.
"""
