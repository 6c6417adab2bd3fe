"""What a person sees on a terminal: bars while things load, the cluster as a table, a session's figures as a line."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from zrt.runtime.messages.client import ActorInfo, Cluster, Finished


class Bars:
    """Progress bars on stderr, one a name; where stderr is no terminal, a line when each begins and ends."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """`done` of `total` bytes (or steps) of `what`; a total of 0 is not known yet."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None)
            if not self._console.is_terminal:
                self._console.print(f"{what} …", highlight=False)
        self._progress.update(self._tasks[what], completed=done, total=total or None)
        if total and done >= total and what not in self._ended:
            self._ended.add(what)
            if not self._console.is_terminal:
                self._console.print(f"{what}: done", highlight=False)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, highlight=False, markup=False)


def cluster_table(cluster: Cluster) -> None:
    """Print the cluster's processes and sessions on stdout."""
    console = Console(file=sys.stdout)
    state = "ready" if cluster.ready else "not ready"
    console.print(
        f"{cluster.name}: {cluster.model}, {cluster.num_blocks} blocks, context {cluster.context}, {state}",
        highlight=False,
    )
    if cluster.fault:
        console.print(cluster.fault, style="red", highlight=False, markup=False)
    table = Table(
        "actor", "state", "blocks", "device", "KV pages", "sessions", "steps", "busy", "memory", "restarts", "process"
    )
    for actor in cluster.actors:
        table.add_row(*_actor_row(actor))
    console.print(table)
    if not cluster.sessions:
        return
    table = Table("session", "state", "prompt", "generated", "epoch", "route")
    for session in cluster.sessions:
        route = " → ".join(session.route)
        table.add_row(
            f"{session.session:016x}",
            session.state,
            str(session.prompt_tokens),
            str(session.completion_tokens),
            str(session.epoch),
            route,
        )
    console.print(table)


def _actor_row(actor: ActorInfo) -> list[str]:
    state = str(actor.state)
    if actor.state == "loading" and actor.total_bytes:
        state = f"loading {actor.done_bytes / actor.total_bytes:.0%}"
    kv = f"{actor.kv.used}/{actor.kv.total}" if actor.kv is not None else ""
    server = actor.kind == "block_server"
    return [
        actor.name,
        f"{state}: {actor.fault}" if actor.fault else state,
        actor.blocks,
        actor.device,
        kv,
        str(actor.sessions) if server else "",
        str(actor.steps) if server else "",
        f"{actor.busy_share:.0%}" if server else "",
        f"{actor.rss_bytes / 2**20:.0f} MiB" if actor.rss_bytes else "",
        str(actor.restarts) if actor.restarts else "",
        f"{actor.host}:{actor.pid}" if actor.pid else "",
    ]


def figures(finished: Finished) -> str:
    """One generation's speed, and where its time went: each stage's share of compute, and what is left for queues and hops."""
    timings = finished.timings
    lines = [
        f"{finished.prompt_tokens} prompt tokens, {finished.completion_tokens} generated ({finished.reason}), "
        f"first token after {timings.ttft_ms:.0f} ms, then {timings.decode_tok_s:.1f} tokens/s"
    ]
    compute = sum(stage.compute_ms for stage in finished.stages)
    for stage in finished.stages:
        share = stage.compute_ms / compute if compute else 0.0
        tokens = max(1, finished.completion_tokens)
        lines.append(
            f"  {stage.name} (blocks {stage.blocks}): {share:.0%} of the compute, "
            f"{stage.compute_ms / tokens:.1f} ms computing and {stage.queue_ms / tokens:.1f} ms waiting a token"
        )
    return "\n".join(lines)
