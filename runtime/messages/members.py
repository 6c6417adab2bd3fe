"""Messages about processes: joining, beats, assignments, states and ends.

Every process registers with the coordinator and then beats once a second. Block servers are told
what to hold (`Assign`), and when to leave service and come back (`SetState`).
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from zrt.runtime.messages.control import Address, Control, Fault
from zrt.runtime.messages.header import U32, U64, Label, Name
from zrt.runtime.messages.stats import LendLoad, Load

ActorKind = Literal["coordinator", "block_server", "layer_worker", "supervisor"]

ActorState = Literal["starting", "blank", "reserve", "loading", "ready", "draining", "drained", "stopped", "failed"]
"""State of a process. A layer worker of which no block server uses layers is shown as `reserve`,
whatever it holds of earlier times; no process says so of itself."""

Serving = Literal["ready", "draining", "drained"]
"""States of a block server that holds its blocks."""

GPU_MEMORY: Final = 0.9
MOST_PARTS: Final = 2048
"""The most parts of a model that one Identify names."""


class Lend(Struct, frozen=True):
    """Blocks first..last (inclusive, global) of a stage that the layer worker of this name
    holds."""

    worker: Name
    first: U64
    last: U64


class Assignment(Struct, frozen=True):
    """What a block server holds: blocks first..last (inclusive, global) of `num_blocks`, in
    `dtype`, with `kv_bytes` of KV memory.

    `serial` tells one assignment from the next; `model` is a reference that the receiver resolves
    on its own machine.
    """

    serial: U64
    model: str
    weights: Literal["files", "random"]
    first: U64
    last: U64
    num_blocks: U64
    dtype: str
    kv_bytes: U64
    context: U64
    sessions: U64
    chunk: U64
    idle_s: float
    tp: U64 = 1
    """Ranks that the blocks are split over; each takes its share of `kv_bytes`."""
    lend: list[Lend] = []
    """Runs of blocks that layer workers hold, each with its share of `kv_bytes`; the workers'
    addresses come as `Workers`."""
    helped: bool = False
    """Whether layer workers without pinned blocks may hold the other blocks, as the block server
    finds best."""
    gpu_memory: float = GPU_MEMORY
    """The part of a CUDA device's memory that weights and KV may take."""


class Register(Control):
    """First message of every process; the reply is `Registered`. `holds` is what a returning
    process still has loaded.

    `cluster` is the id of the cluster that the process belongs to, empty if it has not joined one
    yet: another cluster, which may have got the port meanwhile, refuses it as `unauthorized`.
    `memory_bytes` is the most it may take (0: no limit of its own), `room_bytes` what it could grow
    to on its machine as things are (0: not told; only a blank process tells). With `shares_cores`
    it computes on all cores of its host, beside others that do. `serves` is the block server whose
    layers a layer worker holds, `restarts` how often its parent has started it again.
    """

    kind: ActorKind
    endpoint: Label
    pid: U64
    host: Label
    state: ActorState
    device: Label = ""
    memory_bytes: U64 = 0
    room_bytes: U64 = 0
    holds: Assignment | None = None
    cluster: str = ""
    shares_cores: bool = False
    serves: str = ""
    restarts: U64 = 0


class Beat(Control):
    """Sign of life, sent once a second by every registered process, whatever its executor computes;
    the reply is `Done`.

    `lag_ms` is how late the sender's own loop ran since the last beat, `rss_bytes` its resident
    memory, `room_bytes` as in `Register`.
    """

    state: ActorState
    lag_ms: U64
    rss_bytes: U64
    load: Load | None = None
    room_bytes: U64 = 0


class BeatNow(Control):
    """Request to send a beat at once, answered by `Done` once the coordinator has it: what is known
    of the process is then no older than the request."""


class StateChanged(Control):
    """Change of a block server's state; `fault` says why when the state is `failed`, or when the
    block server loads anew because its ranks or layer workers are lost."""

    state: ActorState
    serial: U64
    fault: Fault | None = None


class Identify(Control):
    """Question of a block server, before it loads and again before it serves, whether these parts
    of what it has are those of the model that the cluster serves; the reply is `Identified`.

    `parts` are digests by name (see models/checkpoint/identity.py): values of the config, and
    tensors of the sender's blocks. More than MOST_PARTS travel in several messages.
    """

    parts: Annotated[dict[Label, Label], Meta(max_length=MOST_PARTS)]


class Identified(Control):
    """Answer to Identify: the names of the parts that are not those of the model. With `unsure`
    it is none: why the coordinator cannot tell yet, and is to be asked again later."""

    differing: list[Label]
    unsure: Label = ""


class LoadProgress(Control):
    """Progress of a load: bytes of weights read so far; then, on a GPU, CUDA graphs captured; and
    the progress of the layer workers, if there are any. Before any are read, `hashes` are the bytes
    that are being hashed."""

    serial: U64
    done: U64
    total: U64
    lend: LendLoad | None = None
    graphs: U32 = 0
    all_graphs: U32 = 0
    hashes: U64 = 0


class ChildDied(Control):
    """Notice from `zrt up` that a process it started is gone. `exit` is the exit status, negative
    for a signal."""

    name: str
    incarnation: U64
    exit: int
    restarting: bool


class Registered(Control):
    """Answer to Register: the coordinator's incarnation, the pace of beats, and the id of the
    cluster, which the coordinator's later incarnations share."""

    incarnation: U64
    beat_ms: U64
    cluster: str = ""


class Assign(Control):
    """Request to hold these blocks. Answered by `Done` at once, then `LoadProgress` and
    `StateChanged` follow. None: hold nothing, as a spare does."""

    assignment: Assignment | None


class Workers(Control):
    """The layer workers of one block server, sent to block servers that lend, with their assignment
    and at each change.

    `awaited` are workers of the cluster file that are not there and may yet come, `gone` processes
    that ended, or are silent.
    """

    workers: list[Address]
    awaited: list[Name] = []
    gone: list[Address] = []


class SetState(Control):
    """Request to drain, or to serve again: outside `ready` no new bare session is taken. Answered
    by `Done`, after all messages that were sent before the request arrived.

    A block server that was drained and loads anew takes `ready` as its state for when it has
    loaded.
    """

    state: Serving


class Kill(Control):
    """Request to send SIGKILL to this process: it has been silent too long, or is to start again. A
    wrong incarnation is ignored; for the name of a process that `zrt up` did not start, the reply
    is bad_request if a reply is expected, else it is ignored as well."""

    name: str
    incarnation: U64


class GoingDown(Control):
    """Notice that the cluster ends, in `within_ms` at the latest: a coordinator that dies meanwhile
    is not lost, and is not to be started again. The last notice counts."""

    within_ms: U32


class Shutdown(Control):
    """Request to end in good order: answered by `Done`, then the process exits with status 0."""


MemberMessage = (
    Register
    | Beat
    | BeatNow
    | StateChanged
    | Identify
    | Identified
    | LoadProgress
    | ChildDied
    | Registered
    | Assign
    | Workers
    | SetState
    | Kill
    | GoingDown
    | Shutdown
)
