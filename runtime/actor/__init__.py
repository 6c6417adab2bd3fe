"""What every actor is made of: a mailbox, links, handlers by message type, pending requests, and
tasks it owns.

In reading order:

- actor.py: an actor; start here
- envelope.py: what a handler gets and returns
- dispatcher.py: each message to its handler, or to the request it answers
- pending.py: pending requests, and how each may end
- link_pool.py: links to other actors, and lost incarnations
- member.py: an actor that joins a coordinator, sends beats, and joins again
- tasks.py: tasks with an owner
- timers.py: periodic calls, and how late the loop was with them
- executor.py: the one thread that tensors are computed in
- log_limiter.py: warnings that others can provoke, bounded
- actor_process.py: the life of an actor's process, to its exit status

May import: runtime/wire/, process/, transport/, messages/ and the files of runtime/ itself. No
actor is known here by name.
"""
