"""The protocol, as msgspec Structs grouped by who receives them.

| from | to | messages | where |
| --- | --- | --- | --- |
| client | coordinator | Generate Resume Cancel Status Subscribe Follow Unsubscribe Drain Undrain Restart Down | client.py |
| coordinator | client | Ok Error Accepted Progress Piece Finished Cluster Changes Drained | client.py, cluster.py |
| any process | coordinator | Register Beat | members.py, stats.py |
| `zrt up` | coordinator | ChildDied | members.py |
| coordinator | block server | Assign Workers SetState Open Credit Close | members.py, sessions.py |
| block server | coordinator | StateChanged LoadProgress Identify Opened Sampled Filled StepFailed | members.py, sessions.py |
| coordinator | first stage | InferenceRequest (token ids: prompts and replays) | inference.py |
| stage | next stage | InferenceRequest (hidden states) | inference.py |
| last stage | first stage | InferenceRequest (token ids: the ring) | inference.py |
| stage | the stage before it | HandOver | sessions.py |
| any peer, bare | block server | InferenceRequest -> InferenceResponse | inference.py |
| block server, as leader | its TP ranks | Ping Init NcclSanityCheck AssignStage LoadDenseShard OpenSession StepBatch … | ranks.py |
| TP rank | its leader | Pong InitOk NcclSanityResult … Error: one response each | ranks.py |
| any peer, bare | TP rank | any of ranks.py's requests -> its response | ranks.py |
| block server, as master | its layer workers | Hello SingleOp Batch Goodbye LayerAssignment ModelDataChunk … | layers.py |
| layer worker | its master | WorkerInfo Tensor LayerAssignmentAck WorkerReady … WorkerError: one answer each | layers.py |
| any peer, bare | layer worker | any of layers.py's that a worker takes -> its answer | layers.py |
| coordinator | `zrt up` | Kill | members.py |
| coordinator | block server | Identified | members.py |
| coordinator | any process | Registered BeatNow GoingDown Shutdown | members.py |

In reading order:

- header.py: the first frame of every message between actors
- control.py: the base of zrt's own messages, addresses and faults
- inference.py: KwaaiNet's request and response: the steps
- sessions.py: sessions on a route: open, credit, close, sampled, filled, failed
- members.py: processes: register, beat, assign, states, ends
- stats.py: what a process says of its work in each beat
- sampling.py: the options of a generation, and log-probabilities
- prompt.py: the base of a client's requests, and the prompt of a generation
- client.py: a client's requests and events
- cluster.py: what clients are told of processes, sessions and events
- ranks.py: helexa's messages: a leader and its TP ranks
- layers.py: Cake's messages: a master and its layer workers

May import: msgspec and runtime/errors.py.

The sampling options of `Generate` and `Open`, and log-probabilities, are in sampling.py; the prompt
of a `Generate` is in prompt.py.

Every multipart between zrt actors starts with the header frame (header.py); a single frame is a
bare documented message.
"""
