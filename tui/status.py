"""The output of `zrt status`: the monitor's tree and sessions on stdout, once or for as long as
they are watched."""

import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final, TypeVar

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from zrt.runtime.client.client import Client
from zrt.runtime.formatting import counted, escaped
from zrt.runtime.messages.client import Cluster
from zrt.tui.rows import Row, Style, Table
from zrt.tui.tables import SESSIONS
from zrt.tui.tree import TREE, nodes

T = TypeVar("T")

WIDE: Final = 1000
"""Columns of output to a file or a pipe: so many that lines are not cut."""
EVERY_S: Final = 0.5
FRESH_MS: Final = 1000
"""Milliseconds since a process was heard of beyond which that is said: processes are asked how they
are, and one that answers is heard of at once."""
COLOURS: Final[dict[Style, str]] = {"plain": "", "dim": "dim", "good": "bold", "warn": "yellow", "bad": "red"}


async def status(endpoint: str | None, *, json: bool, watch: bool) -> int:
    """Print the cluster, as a tree or one JSON object, and return the exit status; with `watch`
    print it again and again until interrupted, in JSON one object per line.

    ZrtError coordinator_lost: the coordinator is not there, or is gone for good.
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
                        live.update(Group(*tree(cluster, live.console.width)), refresh=True)
    return 0


def _print(cluster: Cluster, *, json: bool) -> None:
    if json:
        print(as_json(cluster).decode(), flush=True)
        return
    narrow = sys.stdout.isatty()
    console = Console(width=None if narrow else WIDE)
    for line in tree(cluster, console.width if narrow else None):
        console.print(line, soft_wrap=not narrow)
    sys.stdout.flush()


def as_json(cluster: Cluster) -> bytes:
    """Return the cluster as one JSON object; session ids are written as commands take them."""
    fields = msgspec.to_builtins(cluster)
    for session in fields["sessions"]:
        session["session"] = f"{session['session']:016x}"
    return msgspec.json.encode(fields)


def tree(cluster: Cluster, width: int | None = None) -> list[Text]:
    """Return the cluster in lines: what it is, its processes, its sessions. On a terminal of
    `width` columns rows have what fits there; a process's fault is then a line of its own, which
    may be folded."""
    ready = "ready" if cluster.ready else "not ready"
    lines = [
        Text(
            escaped(
                f"{cluster.name}: {cluster.model}, {counted(cluster.num_blocks, 'block')}, context {cluster.context}, {ready}"
            )
        )
    ]
    if cluster.fault:
        lines.append(Text(escaped(cluster.fault, breaks=True), style="red"))
    for actor in cluster.actors:
        if actor.lend is not None and actor.lend.waits_for:
            lines.append(Text(escaped(f"{actor.name} waits for {actor.lend.waits_for}"), style="yellow"))
        if actor.silent_ms > FRESH_MS:
            text = f"{actor.name} does not answer: what is shown of it is {actor.silent_ms / 1e3:.1f} s old"
            lines.append(Text(escaped(text), style="yellow"))
    rows, told = nodes(cluster), list(cluster.sessions)
    if width is not None:
        for name, style in (("fault", "red"), ("unused", "yellow")):
            said = [(one.name, getattr(one, name)) for one in cluster.actors]
            lines += [Text(escaped(f"{who}: {what}", breaks=True), style=style) for who, what in said if what]
    lines += _table(TREE.fitted(rows, WIDE) if width is None else TREE.within(rows, width), rows)
    if told:
        lines.append(Text(""))
        lines += _table(SESSIONS if width is None else SESSIONS.within(told, width), told)
    return lines


def _table(table: Table[T], items: Sequence[T]) -> list[Text]:
    lines = [Text(table.head.rstrip(), style="underline"), *(_line(table.row(item)) for item in items)]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return lines


def _line(row: Row) -> Text:
    return Text(row.text.rstrip(), style=COLOURS[row.style])
