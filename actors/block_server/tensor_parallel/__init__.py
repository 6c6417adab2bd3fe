"""A group of tensor-parallel ranks, as its leader (rank 0) keeps it.

Every operation is sent to all ranks, the leader does its own part, and every reply is read, also on
failure. A group that breaks is ended and formed anew.

In reading order:

- group.py: the group as a backend: formed, loaded, at work, ended
- rank_processes.py: the ranks' processes: started, watched, ended
- operations.py: one operation over all ranks, and its replies
- group_stats.py: what the leader tells of its ranks
- trial.py: a group formed, checked and ended: `zrt check MODEL --tp N`

May import: runtime/, actors/options.py, the backend of actors/block_server/, and actors/tp_rank/,
whose part the leader plays itself.
"""
