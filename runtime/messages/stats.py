"""What a process says of its work in each beat: turns, KV pages, and the ranks and layer workers it
works with."""

from typing import Literal

from msgspec import Struct

from zrt.runtime.messages.header import U64


class KvStats(Struct, frozen=True):
    """Pages of one pool: free + cached + used = total."""

    free: U64 = 0
    cached: U64 = 0
    used: U64 = 0
    total: U64 = 0
    page_tokens: U64 = 0


RankState = Literal["starting", "joining", "loading", "ready", "lost"]
"""State of a rank: its process starts, joins its group's communicator, reads its shard, serves; it
is lost once its group is broken or has ended."""


class RankLoad(Struct):
    """What a leader knows of one rank (the leader is rank 0), over all groups since the leader got
    its assignment.

    Microseconds, in all: `forward_us` what the rank's forwards took, `drain_us` how long after the
    fan-out its replies came. `free_mb` of `total_mb` MiB of its device's memory are free (on a CPU,
    of the machine's), and `rss_bytes` is the process's own resident memory. `errors` counts the
    operations that it answered with an error or not at all; `error` is the last of these, of the
    process that is there now or was last.
    """

    rank: U64
    pid: U64 = 0
    steps: U64 = 0
    errors: U64 = 0
    forward_us: U64 = 0
    drain_us: U64 = 0
    free_mb: U64 = 0
    total_mb: U64 = 0
    state: RankState = "starting"
    rss_bytes: U64 = 0
    error: str = ""


class GroupStep(Struct):
    """One operation of a group, as its leader clocked it: a step (`op` is step_batch), or any other
    operation that failed.

    `serial` counts the operations from 1, `age_ms` is how long before the load was told the
    operation ended; it ran `rows` tokens of `sessions` sessions. Lists have an entry per rank, the
    leader's first: `forward_us` the time of its forward (0: it did not say), `drain_us` how long
    after the fan-out its reply came (for the leader: its own part was done), `errors` the kind of
    the error that it answered with, or was found guilty of.
    """

    serial: U64
    op: str
    age_ms: U64
    sessions: U64
    rows: U64
    fan_out_us: U64
    forward_us: list[U64]
    drain_us: list[U64]
    errors: list[str]


class GroupLoad(Struct):
    """A tensor-parallel group: its ranks, and how often it was formed anew since its leader got its
    assignment.

    `state` is forming, loading, ready, broken or ended. `comm_id` is the beginning of the
    communicator's id, `comm_age_s` the communicator's age (0: it is not formed). `steps` ran since
    the assignment came, and sending them to the ranks took `fan_out_us` in all; `recent` are the
    last steps (a few dozen), the latest last. `fault` is why the last group broke, empty if none
    did.
    """

    state: str
    world: U64
    rebuilds: U64 = 0
    comm_age_s: float = 0.0
    steps: U64 = 0
    fan_out_us: U64 = 0
    ranks: list[RankLoad] = []
    comm_id: str = ""
    fault: str = ""
    recent: list[GroupStep] = []


WorkerState = Literal["reserve", "asked", "pushing", "loading", "ready", "lost"]


class WorkerLoad(Struct):
    """What a master knows of one layer worker.

    `state` is `reserve` (it has none of the stage's layers), `asked` (for what it holds of them),
    `pushing`, `loading`, `ready` or `lost`; `layers` reads "1-3,5". Of the `total_bytes` of its
    layers' files it has `held_bytes`; `pushed_bytes` were sent to this incarnation in all,
    `push_bytes` for the layers that it has or gets now, at a pace of `push_bytes_s`. Of its
    device's `total_mb` MiB of memory `free_mb` were free when it was asked. Microseconds:
    `latency_us` a request and its answer, `layer_us` one token through one layer, as the worker
    measured, `hop_us` a turn's hop there and back with what the worker computes, `overhead_us` the
    hop without that (medians of the last hops), of `hops` in all.
    """

    name: str
    state: WorkerState
    layers: str = ""
    device: str = ""
    held_bytes: U64 = 0
    total_bytes: U64 = 0
    pushed_bytes: U64 = 0
    push_bytes_s: U64 = 0
    free_mb: U64 = 0
    total_mb: U64 = 0
    latency_us: U64 = 0
    layer_us: U64 = 0
    hop_us: U64 = 0
    hops: U64 = 0
    overhead_us: U64 = 0
    push_bytes: U64 = 0


class LendLoad(Struct):
    """A stage that lends blocks: the blocks it runs itself (`own`, "0,4-7"), and its workers.
    `waits_for` says in words what keeps the stage from being loaded, empty if nothing does;
    `rebuilds` counts how often its layers were given out anew."""

    own: str = ""
    waits_for: str = ""
    rebuilds: U64 = 0
    workers: list[WorkerLoad] = []


class Load(Struct):
    """A block server's counters since its start; times in microseconds.

    Counters of what came too late and was dropped: `dropped_stale` steps, opens and credits of
    older epochs, `stale` messages meant for another incarnation or sent by a coordinator that the
    block server has not joined. `handed` counts the messages whose rows it left in memory for the
    next stage.
    """

    sessions: U64 = 0
    waiting: U64 = 0
    turns: U64 = 0
    steps: U64 = 0
    tokens: U64 = 0
    busy_us: U64 = 0
    dropped_stale: U64 = 0
    kv: KvStats = KvStats()
    stale: U64 = 0
    group: GroupLoad | None = None
    turn_p50_us: U64 = 0
    turn_p95_us: U64 = 0
    """`turn_p50_us` and this 95th percentile are over the turns of about the last minute, at most
    the last few hundred."""
    lend: LendLoad | None = None
    handed: U64 = 0
