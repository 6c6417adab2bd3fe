"""The coordinator's processes: who registers, beats, hangs and dies, and who holds which blocks.

`roster.py` owns the records and `placement.py` the seats; both are pure. `membership.py` hears the
messages.

In reading order:

- membership.py: takes what processes say of themselves, and ChildDied; sends Assign, Workers
- cluster_plan.py: what the cluster file says: seats, memory, assignments
- served_model.py: which model it is that all block servers are to hold
- roster.py: who is there, and what each holds and does
- process_record.py: one registered process
- placement.py: who sits in which seat of the plan, and who gets what is empty
- pipeline.py: the stages in order, and the routes through their replicas
- replica_choice.py: which replica of a stage a session takes
- worker_allocation.py: which layer workers each block server may use
- fresh_beats.py: beats that are asked for, where somebody looks
- drains.py: taking a block server out of service, and back

May import: runtime/ without torch, actors/coordinator/sessions/, and the event log. Pure files
import neither zmq nor asyncio.
"""
