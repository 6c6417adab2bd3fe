"""Rows of the monitor's tables, from what the coordinator tells. Pure: no widgets, no clock."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from rich.cells import set_cell_size

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo, DrainInfo, Happened, SessionInfo
from zrt.runtime.messages.control import RankLoad

Style = Literal["plain", "dim", "good", "warn", "bad"]
STALE_MS: Final = 2500
"""After so long without a beat a process is shown as silent."""
BARS: Final = "▁▂▃▄▅▆▇█"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A line: `key` is what it is about, over all snapshots; `text` is cut and filled to its columns."""

    key: str
    text: str
    style: Style = "plain"


@dataclass(frozen=True)
class Column(Generic[T]):
    """A title, a width in terminal cells (negative: flush right), and what of an item is shown there."""

    title: str
    width: int
    show: Callable[[T], str]


@dataclass(frozen=True)
class Table(Generic[T]):
    """Columns, an item's key and its style."""

    columns: Sequence[Column[T]]
    key: Callable[[T], str]
    style: Callable[[T], Style]

    @property
    def head(self) -> str:
        return " ".join(_cell(column.title, column.width) for column in self.columns)

    def row(self, item: T) -> Row:
        text = " ".join(_cell(column.show(item), column.width) for column in self.columns)
        return Row(self.key(item), text, self.style(item))


def _cell(text: str, width: int) -> str:
    """Cut or filled; control characters, line breaks too, are not shown."""
    clean = text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)
    if width >= 0:
        return set_cell_size(clean, width)
    return clean.rjust(-width) if len(clean) <= -width else set_cell_size(clean, -width)


def bar(part: float, whole: float, width: int) -> str:
    """A share as a bar; empty when there is no whole."""
    if whole <= 0:
        return ""
    full = round(width * min(1.0, max(0.0, part / whole)))
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values, each as a bar of the largest."""
    shown = values[-width:]
    most = max(shown, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in shown)


def amount(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "K", "M", "G"):
        if count < 1024:
            return f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.1f}T"


# ---- the cluster as a tree ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree: a title, a process, or a rank of one."""

    label: str
    actor: ActorInfo | None = None
    rank: RankLoad | None = None

    @property
    def key(self) -> str:
        """Its place: names are unique, and so are titles."""
        return self.label if self.actor is None or self.rank is not None else self.actor.name


def nodes(cluster: Cluster) -> list[Node]:
    """The coordinator, its stages, their replicas, their ranks; then those without a stage."""
    made = [Node(f"{cluster.name}: {cluster.model}")]
    stages = sorted({actor.stage for actor in cluster.actors if actor.stage >= 0})
    groups: list[tuple[str, list[ActorInfo]]] = [
        (f"stage {stage}", [actor for actor in cluster.actors if actor.stage == stage]) for stage in stages
    ]
    rest = [actor for actor in cluster.actors if actor.stage < 0]
    if rest:
        groups.append(("others", rest))
    for number, (title, actors) in enumerate(groups):
        last = number == len(groups) - 1
        blocks = next((actor.blocks for actor in actors if actor.blocks and title != "others"), "")
        made.append(Node(f"{'└' if last else '├'} {title}" + (f", blocks {blocks}" if blocks else "")))
        stem = "  " if last else "│ "
        for place, actor in enumerate(actors):
            end = place == len(actors) - 1
            made.append(Node(f"{stem}{'└' if end else '├'} {actor.name}", actor))
            ranks = actor.group.ranks if actor.group is not None else []
            for rank in ranks:
                made.append(Node(f"{stem}{'  ' if end else '│ '}· {actor.name} rank {rank.rank}", actor, rank))
    return made


def _state(actor: ActorInfo) -> str:
    if actor.state == "loading" and actor.all_graphs:
        return f"graph {actor.graphs}/{actor.all_graphs}"
    if actor.state == "loading" and actor.total_bytes:
        return f"load {actor.done_bytes / actor.total_bytes:.0%}"
    return actor.state


def _actor(show: Callable[[ActorInfo], str], *, served: bool = True) -> Callable[[Node], str]:
    """A cell of processes; `served`: of block servers alone."""

    def cell(node: Node) -> str:
        actor = node.actor
        if actor is None or node.rank is not None or (served and actor.kind != "block_server"):
            return ""
        return show(actor)

    return cell


def _or_rank(cell: Callable[[Node], str], show: Callable[[RankLoad], str]) -> Callable[[Node], str]:
    """A cell that ranks have, too."""
    return lambda node: cell(node) if node.rank is None else show(node.rank)


def _rank_fault(rank: RankLoad) -> str:
    return f"{rank.errors} errors, the last: {rank.error}" if rank.error else ""


def _process(node: Node) -> str:
    actor = node.actor
    if actor is None:
        return ""
    pid = actor.pid if node.rank is None else node.rank.pid
    return f"{actor.host}:{pid}" if pid else ""


def _kv(actor: ActorInfo) -> str:
    kv = actor.kv
    return "" if kv is None or not kv.total else f"{bar(kv.used, kv.total, 6)} {kv.used / kv.total:4.0%}"


def _memory(node: Node) -> str:
    rank, actor = node.rank, node.actor
    if rank is not None and actor is not None:  # the process's own; on a GPU, what is taken of it
        used = rank.rss_bytes if actor.device == "cpu" else (rank.total_mb - rank.free_mb) << 20
        return amount(used) if used else ""
    return amount(node.actor.rss_bytes) if node.actor is not None and node.actor.rss_bytes else ""


def _node_style(node: Node) -> Style:
    actor = node.actor
    if actor is None:
        return "good"
    if actor.state in ("failed", "stopped") or actor.fault:
        return "bad"
    if actor.silent_ms > STALE_MS:
        return "dim"
    state = actor.state if node.rank is None else node.rank.state
    return "bad" if state == "lost" else "plain" if state == "ready" else "warn"


TREE: Final = Table[Node](
    (
        Column("actor", 26, lambda node: node.label),
        Column("state", 9, _or_rank(_actor(_state, served=False), lambda rank: rank.state)),
        Column("KV pages", 11, _actor(_kv)),
        Column("queue", -5, _actor(lambda actor: str(actor.waiting))),
        Column("busy", -5, _actor(lambda actor: f"{actor.busy_share:.0%}")),
        Column("tok/s", -7, _actor(lambda actor: f"{actor.tokens_s:.1f}")),
        Column("memory", -6, _memory),
        Column("p50 ms", -7, _actor(lambda actor: f"{actor.turn_p50_ms:.1f}")),
        Column("p95 ms", -7, _actor(lambda actor: f"{actor.turn_p95_ms:.1f}")),
        Column("sessions", -8, _actor(lambda actor: str(actor.sessions))),
        Column("restarts", -8, _actor(lambda actor: str(actor.restarts), served=False)),
        Column("device", 7, _actor(lambda actor: actor.device)),
        Column("process", 24, _process),
        Column("fault", 200, _or_rank(_actor(lambda actor: actor.fault, served=False), _rank_fault)),
    ),
    key=lambda node: node.key,
    style=_node_style,
)

# ---- sessions -------------------------------------------------------------------------------------------------------

SESSIONS: Final = Table[SessionInfo](
    (
        Column("session", 16, lambda one: f"{one.session:016x}"),
        Column("state", 9, lambda one: one.state),
        Column("prompt", -6, lambda one: str(one.prompt_tokens)),
        Column("new", -6, lambda one: str(one.completion_tokens)),
        Column("tok/s", -7, lambda one: f"{one.tokens_s:.1f}"),
        Column("ttft ms", -8, lambda one: f"{one.ttft_ms:.0f}" if one.ttft_ms else "–"),
        Column("between tokens", 16, lambda one: sparkline(one.gaps_ms, 16)),
        Column("epoch", -5, lambda one: str(one.epoch)),
        Column("pages", -5, lambda one: str(one.kv_pages)),
        Column("client", 15, lambda one: one.client.removeprefix("client.")),
        Column("route", 60, lambda one: " → ".join(one.route)),
    ),
    key=lambda one: f"{one.session:016x}",
    style=lambda one: "plain" if one.state == "decoding" else "bad" if one.fault else "warn",
)

ORDERS: Final[dict[str, Callable[[SessionInfo], object]]] = {
    "age": lambda one: one.asked_ms,
    "tokens": lambda one: -one.completion_tokens,
    "pace": lambda one: -one.tokens_s,
    "ttft": lambda one: -one.ttft_ms,
    "state": lambda one: one.state,
}
"""How sessions may be sorted."""


def sessions(all_: Iterable[SessionInfo], order: str, wanted: str) -> list[SessionInfo]:
    """Those with `wanted` in their id, state, client or route, in order."""
    chosen = [one for one in all_ if not wanted or wanted in _words(one)]
    return sorted(chosen, key=ORDERS[order])  # type: ignore[arg-type]


def _words(one: SessionInfo) -> str:
    return f"{one.session:016x} {one.state} {one.client} {' '.join(one.route)}".lower()


# ---- events and drains ----------------------------------------------------------------------------------------------


def _event_style(event: Happened) -> Style:
    if event.kind in ("death", "error"):
        return "bad"
    return "warn" if event.kind in ("reroute", "rebuild", "preemption", "refusal") else "plain"


EVENTS: Final = Table[Happened](
    (
        Column("time", 8, lambda event: time.strftime("%H:%M:%S", time.localtime(event.at))),
        Column("what", 10, lambda event: event.kind),
        Column("where", 18, lambda event: event.where),
        Column("error", 12, lambda event: event.error),
        Column("", 160, lambda event: event.text),
    ),
    key=lambda event: str(event.serial),
    style=_event_style,
)


def events(all_: Iterable[Happened], wanted: str) -> list[Happened]:
    """The newest first, of those with `wanted` in them."""
    chosen = [one for one in all_ if not wanted or wanted in f"{one.kind} {one.where} {one.error} {one.text}".lower()]
    return chosen[::-1]


@dataclass(frozen=True, slots=True)
class ReplyDrain:
    """One rank's part in the steps of its group between two snapshots: means a step, in microseconds."""

    at: float
    leader: str
    rank: int
    steps: int
    fan_out_us: float
    forward_us: float
    drain_us: float
    errors: int


REPLIES: Final = Table[ReplyDrain](
    (
        Column("time", 8, lambda one: time.strftime("%H:%M:%S", time.localtime(one.at))),
        Column("leader", 18, lambda one: one.leader),
        Column("rank", -4, lambda one: str(one.rank)),
        Column("steps", -6, lambda one: str(one.steps)),
        Column("fan-out µs", -10, lambda one: f"{one.fan_out_us:.0f}"),
        Column("forward µs", -10, lambda one: f"{one.forward_us:.0f}"),
        Column("drain µs", -10, lambda one: f"{one.drain_us:.0f}"),
        Column("errors", -6, lambda one: str(one.errors)),
    ),
    key=lambda one: f"{one.leader} {one.rank} {one.at}",
    style=lambda one: "bad" if one.errors else "plain",
)

DRAINS: Final = Table[DrainInfo](
    (
        Column("actor", 18, lambda one: one.name),
        Column("state", 9, lambda one: one.state),
        Column("left", -5, lambda one: str(one.left)),
        Column("moved", -5, lambda one: str(one.moved)),
        Column("finished", -8, lambda one: str(one.finished)),
        Column("parked", -6, lambda one: str(one.parked)),
        Column("time", 16, lambda one: f"{one.spent_ms / 1e3:.1f} of {one.timeout_ms / 1e3:g} s"),
        Column("asked by", 30, lambda one: one.asker),
    ),
    key=lambda one: one.name,
    style=lambda one: "warn" if one.state == "draining" else "bad" if one.state == "failed" else "plain",
)
