"""What a client says to the coordinator and hears back: one msgpack map per ZeroMQ message, single
frame, no header.

Anything that can send msgpack over a DEALER can be a client. Connect to the cluster's endpoint,
send one request, read events. Every request carries an `id` of the client's choice (any string to
64 characters, unique among its open requests) and every event repeats it. A map's `type` is the
class name in snake_case:

       {"type": "generate", "id": "1", "prompt": "Why is the sky blue?", "max_tokens": 64}
    -> {"type": "accepted", "id": "1", "session": 123, "seed": 42, "prompt_tokens": 36,
        "resume": "5f1c…", "lease_s": 10.0}
    -> {"type": "progress", "id": "1", "phase": "prefill", "done": 36, "total": 36}
    -> {"type": "piece", "id": "1", "index": 0, "text": "The", "token_ids": [504]}
    -> ...
    -> {"type": "finished", "id": "1", "reason": "stop", "prompt_tokens": 36,
        "completion_tokens": 12, ...}

A generation exists from the arrival of its request: until `accepted` it may be in phase
`tokenising`, is listed and can be cancelled, and ends with its client's connection.

A request that fails ends with one `error` event. Absent fields take the defaults below, in events
as well; unknown fields of a request are refused. With `n` > 1 a request has n answers, told apart
by `choice`: each is a session of its own with `accepted` and `finished`, and the events of all of
them are mixed. One `error` ends them all.

A connection that breaks loses nothing: connect again and `resume` each session from where its
events ended, within `lease_s` seconds.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from zrt.runtime.messages.cluster import ActorInfo, DrainInfo, Happened, SessionInfo
from zrt.runtime.messages.control import snake
from zrt.runtime.messages.header import U64
from zrt.runtime.messages.prompt import Id, Request
from zrt.runtime.messages.sampling import SamplingRequest, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled", "error"]
Phase = Literal["tokenising", "queued", "prefill", "decoding", "waiting", "preempted", "parked", "replaying"]


class Event(Struct, tag_field="type", tag=snake, kw_only=True):
    """Base of the events that a client hears."""

    id: Id


# ---- requests ------------------------------------------------------------------------------------


class Generate(SamplingRequest):
    """Request to start a generation: prompt.py (PromptRequest) has the fields of the prompt,
    sampling.py (SamplingRequest) those of the options.

    Session ids are numbers here; for people they are written as 16 hexadecimal digits.
    """


class Resume(Request):
    """Request to continue a session over this connection, whichever connection it began on; the
    session's events have this `id` from now on.

    `resume` is what the session's `accepted` said. `index` is how many of its tokens have been
    heard (the last piece's `index` plus the length of its `token_ids`), `chars` how many characters
    (Unicode code points) of its text: what follows them is sent again, once. Answered by `accepted`
    as before, then a `piece` with what is lacking, then the usual events; the sessions of one
    request may share an `id`.

    Errors: resume_expired (the client was away for longer than the lease, or the session ended
    longer ago than that); coordinator_lost (the coordinator that ran the session is gone, and the
    session with it: send the prompt and the answer so far as `token_ids` of a new `generate`, with
    the same seed); unauthorized (`resume` is not that session's); bad_request (more tokens or
    characters than there are).
    """

    session: U64
    resume: str
    index: U64 = 0
    chars: U64 = 0


class Cancel(Request):
    """Request to stop one session, by its id, or all sessions of one of this client's `generate`
    requests, by the request's `id`; exactly one of the two is given.

    Each session ends with `finished`, reason `cancelled`, also before it was `accepted`. Answered
    by `ok`, or `error` unknown_session.
    """

    session: int | None = None
    request: Id | None = None


class Status(Request):
    """Request for one `cluster` event."""


class Subscribe(Request):
    """Request to watch the cluster: a `cluster` event now, then `changes` after every change of
    state (at most ten a second) and every `every_ms` in any case, until `unsubscribe` or the client
    is gone. `happened` holds only what is new since the last event of this subscription.

    A subscriber that does not keep up gets fewer events, each with all that changed since the one
    before. A subscriber that missed an event (`serial`) sends the same request again, and gets a
    `cluster` first, as over every new connection.
    """

    every_ms: Annotated[int, Meta(ge=100, le=10_000)] = 1000


class Follow(Request):
    """Request to follow a session, whoever started it: a `piece` with its text so far, then its
    `progress` and `piece` events as they come, at last `finished` or the session's error;
    `unsubscribe` ends this earlier. Errors: unknown_session, overloaded (16 others follow the
    session already)."""

    session: U64


class Unsubscribe(Request):
    """Request to end the subscription with this `id`; answered by `ok`."""


class Drain(Request):
    """Request to take a block server out of service with nothing lost. The block server takes no
    new session; its sessions move to another replica of its stage (they are replayed there), or,
    while there is none, continue until they finish. A session that still runs after `timeout_ms` is
    parked: its history is kept, its pages are freed on every stage, and it continues when a
    replica, a restart or an undrain comes.

    Answered by `drained` events: state `draining` at least once a second, then one with state
    `drained`. The block server keeps its weights and its place. Errors: bad_request (no block
    server has this name), warming_up or model_not_loaded (the block server is not ready), draining
    (it is draining or drained already), cancelled (it was undrained meanwhile), stage_lost (it
    died).
    """

    name: str
    timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 30_000


class Undrain(Request):
    """Request to let a draining or drained block server serve again; answered by `ok`. A block
    server that lost a part and loads anew serves when it has loaded. Errors: bad_request (no block
    server has this name, or it is neither draining nor drained), warming_up (its process is being
    started: it is not drained)."""

    name: str


class Restart(Request):
    """Request to have `zrt up` kill a block server or layer worker and start it again; its sessions
    take another route, or wait. Answered by `ok` once the process is killed. Errors: bad_request
    (no process has this name, or `zrt up` did not start it), warming_up (the process is being
    started), unsupported (there is no `zrt up`)."""

    name: str


class Down(Request):
    """Request to bring the cluster down; answered by `ok` before the cluster ends. From now on no
    session is taken (`draining`); running sessions may finish for `timeout_ms`, and end with
    `cancelled` then. A second request ends the cluster without waiting."""

    timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 5_000


ClientRequest = (
    Generate | Resume | Cancel | Status | Subscribe | Follow | Unsubscribe | Drain | Undrain | Restart | Down
)


# ---- events --------------------------------------------------------------------------------------


class Ok(Event):
    """Reply to a request that was done and has no other answer."""


class Error(Event):
    """Failure of a request; `kind` is one of errors.KINDS. `id` is empty when the request could not
    be decoded that far."""

    id: str
    kind: str
    message: str
    where: str = ""


class Answering(Event, omit_defaults=True, kw_only=True):
    """Base of the events of one answer: `choice` counts a request's answers from 0."""

    choice: int = 0


class Accepted(Answering):
    """Start of a session: its id, the seed it samples with, and the prompt's length in tokens.

    `resume` is the secret with which the session may be resumed, within `lease_s` seconds, over
    another connection. `notes` says which settings of the model's generation_config are not
    applied.
    """

    session: int
    seed: int
    prompt_tokens: int
    resume: str = ""
    lease_s: float = 0.0
    notes: list[str] = []


class Progress(Answering):
    """What happens before and between tokens: `done` of `total` of the text are tokenised, of the
    prompt's tokens have run, or a place in the queue, a replay, a wait."""

    phase: Phase
    done: int = 0
    total: int = 0
    message: str = ""


class Piece(Answering):
    """Text that will not change any more, and the token ids sampled since the last piece; `index`
    counts the tokens before this piece.

    `logprobs` is there if the request asked for log-probabilities: one entry per token of
    `token_ids`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class StageShare(Struct):
    """One stage's blocks and where its time went over a generation, in milliseconds: waiting in its
    queue, computing, handing results on. `lent_ms` is the part of the computing that its layer
    workers took, there and back."""

    name: str
    blocks: str
    queue_ms: float
    compute_ms: float
    encode_ms: float = 0.0
    lent_ms: float = 0.0


class Timings(Struct):
    """Timings of one answer: `queue_ms` until admission, `ttft_ms` until the first token,
    `decode_tok_s` tokens a second after the first (0: fewer than two), and `network_ms` the part of
    the tokens' time that no stage accounts for: sockets and wake-ups."""

    queue_ms: float
    ttft_ms: float
    decode_tok_s: float
    network_ms: float = 0.0


class Finished(Answering):
    """End of an answer. `token_ids` of all its pieces together hold every sampled token, a final
    end-of-sequence included."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    timings: Timings
    stages: list[StageShare] = []


class Cluster(Event):
    """The whole cluster at one moment. `actors` are in pipeline order, actors without a stage last,
    the coordinator among them; `sessions` are the oldest first. `ready` is true when every stage
    has a ready replica; `incarnation` is the coordinator's: with another incarnation all counts
    begin anew. `stale` counts the messages that the coordinator itself dropped because they came
    too late. `tokens` were generated, and `errors` told to clients by kind, in the `up_ms` since
    the coordinator began. `drains` are the last drains, `happened` the last events (a few
    hundred)."""

    name: str
    model: str
    ready: bool
    context: int
    num_blocks: int
    fault: str = ""
    actors: list[ActorInfo] = []
    sessions: list[SessionInfo] = []
    stale: int = 0
    up_ms: int = 0
    tokens: int = 0
    incarnation: int = 0
    errors: dict[str, int] = {}
    drains: list[DrainInfo] = []
    happened: list[Happened] = []


class Changes(Event, omit_defaults=True, kw_only=True):
    """What has changed since the last event of the same subscription: since its `cluster`, or its
    `changes` with the previous `serial` (the first after a `cluster` has 1).

    `cluster` holds fields of the `cluster` event itself, `actors` those of processes by name,
    `sessions` those of sessions by id. A field that is absent is unchanged; a field that is present
    replaces the old value whole, lists too. A new process or session has all its fields; one that
    is None is gone. Of `gaps_ms` only the new entries come, as `new_gaps_ms`: append them, and keep
    the last GAPS. `happened` holds new events alone.
    """

    serial: int
    cluster: dict[str, Any] = {}
    actors: dict[str, dict[str, Any] | None] = {}
    sessions: dict[int, dict[str, Any] | None] = {}
    happened: list[Happened] = []


class Drained(Event):
    """Progress of a drain, and at last its result. Of the sessions that ran through `name` when the
    drain began, `left` still do; the others were `moved` to another replica, have `finished` (or
    were cancelled), or were `parked`."""

    name: str
    state: Literal["draining", "drained"]
    left: int
    moved: int
    finished: int
    parked: int


ClientEvent = Ok | Error | Accepted | Progress | Piece | Finished | Cluster | Changes | Drained
