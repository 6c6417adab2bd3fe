"""A block server: holds a run of a model's blocks, and runs the steps of many sessions through it.

In reading order:

- block_server.py: the actor, made from its options: assignment, states, what is lost
- assigned_blocks.py: what is loaded, and what serves it: alone, ranks or workers
- routed_sessions.py: sessions that the coordinator opened; results go onward
- bare_sessions.py: sessions of foreign peers, answered one by one
- stage_session.py: one routed session as this stage sees it
- step_queue.py: what waits, and which of it makes the next turn
- prefill_budget.py: how many prompt tokens a turn may carry
- turn_loop.py: take what waits, run it as one forward, hand it on
- step_owner.py: what the turn loop asks of whoever owns a step
- turn_delivery.py: a turn's results: onward, to the coordinator, round the ring
- backend.py: who runs a turn: this executor, or it and its ranks
- stage_transfer.py: how results reach the next stage
- memory_channels.py: rows handed over in memory, within one machine
- tensor_parallel/: a group of ranks that this process leads
- layer_lending/: layer workers whose master this process is

May import: runtime/, actors/options.py, actors/tp_rank/ and actors/layer_worker/. Tensors are
touched in the executor alone.
"""
