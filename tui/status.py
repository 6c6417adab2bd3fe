"""`zrt status`: the monitor's tree and sessions on stdout, once or for as long as they are watched."""

import sys
from contextlib import aclosing
from typing import Final

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from zrt.runtime.client import Client
from zrt.runtime.counted import counted
from zrt.runtime.messages.client import Cluster
from zrt.tui.rows import Row, Style, clean
from zrt.tui.tables import SESSIONS
from zrt.tui.tree import TREE, nodes

WIDE: Final = 1000
"""Columns of what goes to a file or a pipe: lines are not cut."""
EVERY_S: Final = 0.5
COLOURS: Final[dict[Style, str]] = {"plain": "", "dim": "dim", "good": "bold", "warn": "yellow", "bad": "red"}


async def status(endpoint: str | None, *, json: bool, watch: bool) -> int:
    """Print the cluster, as a tree or one JSON object; with `watch` again and again until interrupted, as JSON an object a line.

    ZrtError coordinator_lost: it is not there, or is gone for good.
    """
    async with Client(endpoint) as client:
        if not watch:
            _print(await client.status(), json=json)
            return 0
        async with aclosing(client.watch(every=EVERY_S)) as seen:
            if json or not sys.stdout.isatty():
                async for cluster in seen:
                    _print(cluster, json=json)
            else:
                with Live(console=Console(), screen=True, auto_refresh=False) as live:
                    async for cluster in seen:
                        live.update(Group(*tree(cluster)), refresh=True)
    return 0


def _print(cluster: Cluster, *, json: bool) -> None:
    if json:
        print(as_json(cluster).decode(), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for line in tree(cluster):
        console.print(line, soft_wrap=not sys.stdout.isatty())
    sys.stdout.flush()


def as_json(cluster: Cluster) -> bytes:
    """One object; ids of sessions are said as commands take them."""
    fields = msgspec.to_builtins(cluster)
    for session in fields["sessions"]:
        session["session"] = f"{session['session']:016x}"
    return msgspec.json.encode(fields)


def tree(cluster: Cluster) -> list[Text]:
    """The cluster in lines: what it is, its processes, its sessions."""
    ready = "ready" if cluster.ready else "not ready"
    lines = [
        Text(
            clean(
                f"{cluster.name}: {cluster.model}, {counted(cluster.num_blocks, 'block')}, context {cluster.context}, {ready}"
            )
        )
    ]
    if cluster.fault:
        lines.append(Text(clean(cluster.fault), style="red"))
    for actor in cluster.actors:
        if actor.lend is not None and actor.lend.waits_for:
            lines.append(Text(clean(f"{actor.name} waits for {actor.lend.waits_for}"), style="yellow"))
    rows = nodes(cluster)
    table = TREE.fitted(rows, WIDE)
    lines.append(Text(table.head.rstrip(), style="underline"))
    lines += [_line(table.row(node)) for node in rows]
    if cluster.sessions:
        lines += [Text(""), Text(SESSIONS.head.rstrip(), style="underline")]
        lines += [_line(SESSIONS.row(session)) for session in cluster.sessions]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return lines


def _line(row: Row) -> Text:
    return Text(row.text.rstrip(), style=COLOURS[row.style])
