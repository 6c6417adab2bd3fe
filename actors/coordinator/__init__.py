"""The coordinator: members register with it, clients stream from it, and it plans and routes.

It keeps the token history of every session, so whatever held a part of one can be replaced and
filled again. It computes no tensors and never imports torch.

In reading order:

- coordinator.py: the actor, made from its options; wires the rooms below
- client_requests.py: what clients ask, and who does it
- fleet/: the processes: who is there, what each holds, drains
- prompts/: requests on their way to token ids: bounded, fair, cancellable
- sessions/: the sessions: accepted, admitted, routed, streamed, ended
- subscribers.py: those who watch the cluster, and what each is told
- event_log.py: what happened lately, bounded
- metrics.py: the cluster as Prometheus text
- metrics_server.py: GET /metrics and GET /healthz over HTTP

May import: runtime/ without torch, and actors/options.py; no other actor's room.
"""
