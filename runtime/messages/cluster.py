"""What a client is told of a cluster's parts: its processes, its sessions, its drains and its
events."""

from typing import Final, Literal

from msgspec import Struct

from zrt.runtime.messages.members import ActorState
from zrt.runtime.messages.stats import GroupLoad, KvStats, LendLoad

GAPS: Final = 24
"""The number of times between tokens that a SessionInfo holds."""


class ActorInfo(Struct):
    """One process as the coordinator sees it: `name` says who it is, `stage` which stage it serves,
    whatever its name (-1: none). `blocks` reads "0-14", empty while the process is blank;
    `silent_ms` is the time since its last beat, and so the age of its counts. `unused` says why it
    is given nothing where it might be needed.

    `done_bytes` of `total_bytes` of its weights are loaded; `rss_bytes` is its resident memory.
    `stale` counts the messages that it dropped because they came too late: steps of older epochs,
    messages meant for or sent by processes that are no more. `handed` counts the messages whose
    rows it left in memory for the next stage, on a GPU of the same machine.
    """

    name: str
    kind: str
    state: ActorState
    endpoint: str = ""
    pid: int = 0
    host: str = ""
    device: str = ""
    stage: int = -1
    blocks: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    sessions: int = 0
    waiting: int = 0
    turns: int = 0
    steps: int = 0
    busy_share: float = 0.0
    rss_bytes: int = 0
    restarts: int = 0
    silent_ms: int = 0
    kv: KvStats | None = None
    fault: str = ""
    stale: int = 0
    handed: int = 0
    group: GroupLoad | None = None
    """The process's tensor-parallel ranks."""
    tokens_s: float = 0.0
    """Tokens that the process ran per second, prompts included, between its last two beats."""
    turn_p50_ms: float = 0.0
    turn_p95_ms: float = 0.0
    lend: LendLoad | None = None
    """The process's layer workers, if it lends blocks."""
    graphs: int = 0
    """CUDA graphs that the process has captured of `all_graphs`, once its weights are loaded on a
    GPU."""
    all_graphs: int = 0
    hashes: int = 0
    """Bytes of weights that the process hashes before it loads; 0 where their digests are known."""
    unused: str = ""


def pipeline_order(actor: ActorInfo) -> tuple[int, str]:
    """Return a process's sort key: by stage, processes without a stage last, then by name."""
    return actor.stage if actor.stage >= 0 else 1 << 30, actor.name


class HopInfo(Struct):
    """What one stage spent on a token of a session, averaged over the tokens that took its current
    route: waiting in its queue, computing, encoding."""

    name: str
    queue_ms: float
    compute_ms: float
    encode_ms: float


class SessionInfo(Struct):
    """One live session. `client` is its connection, `asked_ms` the time of its request on the clock
    of `Cluster.up_ms`, `ttft_ms` 0 before its first token, `tokens_s` the pace of its last tokens,
    `gaps_ms` the times between these, at most GAPS, the latest last. `network_ms` is the part of a
    token's time that no stage accounts for."""

    session: int
    state: str
    prompt_tokens: int
    completion_tokens: int
    epoch: int
    route: list[str] = []
    client: str = ""
    asked_ms: int = 0
    ttft_ms: float = 0.0
    tokens_s: float = 0.0
    gaps_ms: list[float] = []
    hops: list[HopInfo] = []
    network_ms: float = 0.0
    kv_pages: int = 0
    fault: str = ""


class Happened(Struct):
    """An event that a person may want to look up later. `at` is Unix time in seconds, of the
    coordinator's clock; `serial` counts from 1. `error` is one of errors.KINDS where there is one,
    `where` an actor or a session."""

    serial: int
    at: float
    kind: Literal["state", "death", "reroute", "rebuild", "preemption", "drain", "down", "refusal", "error"]
    where: str
    text: str
    error: str = ""


class DrainInfo(Struct):
    """A drain that runs, or ran: who asked for it, how long it has taken of the time given, and
    what became of the sessions (as in `Drained`). `state` is `drained` for as long as the block
    server is; then `undrained`, or `gone` once its process is."""

    name: str
    state: Literal["draining", "drained", "failed", "undrained", "gone"]
    asker: str
    timeout_ms: int
    spent_ms: int
    left: int = 0
    moved: int = 0
    finished: int = 0
    parked: int = 0
