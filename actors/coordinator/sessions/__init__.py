"""The coordinator's sessions, from a client's request to its last token.

In reading order:

- generations.py: all live sessions: start, tokens, faults, end
- stage_reports.py: what stages report: sampled, filled, failed
- admission.py: who may run: queue, KV pages, slots
- session.py: one session: history, text, states
- generation.py: one live session with its client and its clock
- routing.py: a new epoch: open on every replica, replay what they lack
- rerouting.py: other routes after a loss or for a drain; preempted, parked
- quarantine.py: sessions that may be why stages are lost
- delivery.py: one client's events in order, over broken connections
- latencies.py: how long clients waited for tokens, as histograms

May import: runtime/ without torch, actors/coordinator/prompts/, roster and pipeline of
actors/coordinator/fleet/, and the event log. session.py, admission.py and quarantine.py import
neither zmq nor asyncio.
"""
