"""The cluster as a tree: the coordinator, its stages, their replicas, and the ranks and layer
workers of these. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from zrt.runtime.formatting import counted
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.stats import RankLoad, WorkerLoad
from zrt.tui.rows import Column, Style, Table, amount, bar

STALE_MS: Final = 2500
"""Milliseconds without a beat after which a process is shown as silent."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A line of the tree: a title in a `state`, or a process (`actor`). With `rank` or `worker` the
    line shows what a leader says of its rank, or a master of its worker; `actor` is then the
    worker's own account of itself, if there is any."""

    key: str
    label: str
    actor: ActorInfo | None = None
    rank: RankLoad | None = None
    worker: WorkerLoad | None = None
    state: str = ""


def nodes(cluster: Cluster) -> list[TreeNode]:
    """Return the lines of the tree: stages in pipeline order, then processes without a stage; a
    layer worker is under the stage that has it."""
    made = [TreeNode("", f"{cluster.name}: {cluster.model}", state="ready" if cluster.ready else "not ready")]
    lent = {worker.name for actor in cluster.actors if actor.lend is not None for worker in actor.lend.workers}
    workers = {actor.name: actor for actor in cluster.actors if actor.name in lent and actor.stage < 0}
    groups: dict[int, list[ActorInfo]] = {}
    for actor in cluster.actors:
        if actor.name not in workers:
            groups.setdefault(max(actor.stage, -1), []).append(actor)
    rest = groups.pop(-1, [])
    order = [*sorted(groups.items()), *([(-1, rest)] if rest else [])]
    for number, (stage, actors) in enumerate(order):
        last = number == len(order) - 1
        made.append(_title(stage, actors, "└" if last else "├"))
        stem = "  " if last else "│ "
        for place, actor in enumerate(actors):
            end = place == len(actors) - 1
            made.append(TreeNode(actor.name, f"{stem}{'└' if end else '├'} {actor.name}", actor))
            made += _under(actor, f"{stem}{'  ' if end else '│ '}", workers)
    return made


def _title(stage: int, actors: list[ActorInfo], branch: str) -> TreeNode:
    if stage < 0:
        return TreeNode("others", f"{branch} others")
    blocks = next((actor.blocks for actor in actors if actor.blocks), "")
    ready = sum(actor.state == "ready" for actor in actors)
    label = f"{branch} stage {stage}" + (f", blocks {blocks}" if blocks else "")
    return TreeNode(f"stage {stage}", label, state=f"{ready}/{len(actors)}")


def _under(actor: ActorInfo, stem: str, workers: dict[str, ActorInfo]) -> list[TreeNode]:
    ranks = actor.group.ranks if actor.group is not None else []
    made = [TreeNode(f"{actor.name} rank {rank.rank}", f"rank {rank.rank}", actor, rank=rank) for rank in ranks]
    lent = actor.lend.workers if actor.lend is not None else []
    made += [
        TreeNode(worker.name, f"{worker.layers or '–'}: {worker.name}", workers.get(worker.name), worker=worker)
        for worker in lent
    ]
    return [
        TreeNode(
            node.key,
            f"{stem}{'└' if place == len(made) - 1 else '├'} {node.label}",
            node.actor,
            node.rank,
            node.worker,
        )
        for place, node in enumerate(made)
    ]


def _state(node: TreeNode) -> str:
    if node.rank is not None:
        return node.rank.state
    if node.worker is not None:
        worker = node.worker
        part = f" {worker.held_bytes / worker.total_bytes:.0%}" if worker.total_bytes else ""
        return f"push{part}" if worker.state == "pushing" else worker.state
    actor = node.actor
    if actor is None:
        return node.state
    if actor.state == "loading" and actor.hashes:
        return "hash"
    if actor.state == "loading" and actor.all_graphs:
        return f"graph {actor.graphs}/{actor.all_graphs}"
    if actor.state == "loading" and actor.total_bytes:
        return f"load {actor.done_bytes / actor.total_bytes:.0%}"
    return actor.state


def _server(show: Callable[[ActorInfo], str]) -> Callable[[TreeNode], str]:
    """Return the `show` of a column that is filled for block servers alone."""
    return lambda node: show(actor) if (actor := served(node)) is not None else ""


def served(node: TreeNode) -> ActorInfo | None:
    """Return the block server that this line shows, if it shows one."""
    actor = node.actor
    return actor if actor is not None and actor.kind == "block_server" and node.rank is None else None


def _process(show: Callable[[ActorInfo], str]) -> Callable[[TreeNode], str]:
    """Return the `show` of a column that is filled for processes that have registered."""
    return lambda node: show(node.actor) if node.actor is not None and node.rank is None else ""


def _kv(actor: ActorInfo) -> str:
    kv = actor.kv
    return "" if kv is None or not kv.total else f"{bar(kv.used, kv.total, 6)} {kv.used / kv.total:4.0%}"


def _memory(node: TreeNode) -> str:
    size = node.rank.rss_bytes if node.rank is not None else node.actor.rss_bytes if node.actor is not None else 0
    return amount(size) if size else ""


def _middle(node: TreeNode) -> str:
    """Return how long a turn takes, in ms; for a rank its part of a step on average, for a worker a
    hop there and back."""
    if node.rank is not None:
        return f"{node.rank.drain_us / node.rank.steps / 1e3:.1f}" if node.rank.steps else ""
    if node.worker is not None:
        return f"{node.worker.hop_us / 1e3:.1f}" if node.worker.hops else ""
    actor = served(node)
    return f"{actor.turn_p50_ms:.1f}" if actor is not None else ""


def _device(node: TreeNode) -> str:
    if node.worker is not None:
        return node.worker.device
    return node.actor.device if node.actor is not None and node.rank is None else ""


def _where(node: TreeNode) -> str:
    if node.rank is not None:
        return f"{node.actor.host if node.actor is not None else ''}:{node.rank.pid}" if node.rank.pid else ""
    actor = node.actor
    return f"{actor.host}:{actor.pid}" if actor is not None and actor.pid else ""


def _fault(node: TreeNode) -> str:
    if node.rank is not None:
        return f"{counted(node.rank.errors, 'error')}, the last: {node.rank.error}" if node.rank.error else ""
    actor = node.actor
    if actor is None:
        return ""
    waits = f"waits for {actor.lend.waits_for}" if actor.lend is not None and actor.lend.waits_for else ""
    group = actor.group
    broken = group.fault if group is not None and group.state != "ready" else ""
    return actor.fault or waits or broken or actor.unused


def _style(node: TreeNode) -> Style:
    state = _state(node)
    if node.actor is None and node.worker is None:
        return "warn" if state == "not ready" or state.startswith("0/") else "good"
    if state in ("failed", "stopped", "lost"):
        return "bad"
    if node.actor is not None:
        if node.rank is None and node.actor.fault:
            return "bad"
        if node.actor.silent_ms > STALE_MS:
            return "dim"
    return "plain" if state == "ready" else "warn"


TREE: Final = Table[TreeNode](
    (
        Column("actor", 25, lambda node: node.label, most=40),
        Column("state", 9, _state),
        Column("KV pages", 11, _server(_kv)),
        Column("queue", -5, _server(lambda actor: str(actor.waiting))),
        Column("busy", -5, _server(lambda actor: f"{actor.busy_share:.0%}")),
        Column("tok/s", -6, _server(lambda actor: f"{actor.tokens_s:.1f}")),
        Column("memory", -6, _memory),
        Column("p50 ms", -6, _middle),
        Column("p95 ms", -7, _server(lambda actor: f"{actor.turn_p95_ms:.1f}")),
        Column("sessions", -8, _server(lambda actor: str(actor.sessions))),
        Column("restarts", -8, _process(lambda actor: str(actor.restarts))),
        Column("device", 7, _device),
        Column("process", 24, _where),
        Column("fault", 200, _fault),
    ),
    key=lambda node: node.key,
    style=_style,
)
