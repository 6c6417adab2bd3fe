"""Tables of the monitor besides the tree: sessions, events, drains of block servers, and the
replies that leaders drained from their ranks. Pure."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import DrainInfo, Happened, SessionInfo
from zrt.runtime.messages.stats import GroupStep
from zrt.tui.rows import Column, Style, Table, sparkline


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


# ---- sessions ------------------------------------------------------------------------------------

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
        Column("client", 16, lambda one: one.client.removeprefix("client.")),
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
"""Sort keys of sessions, by the name of the order."""


def sessions(all_: Iterable[SessionInfo], order: str, wanted: str) -> list[SessionInfo]:
    """Return the sessions with `wanted` in their id, state, client or route, in order."""
    chosen = [one for one in all_ if not wanted or wanted in _words(one)]
    return sorted(chosen, key=ORDERS[order])  # type: ignore[arg-type]


def _words(one: SessionInfo) -> str:
    return f"{one.session:016x} {one.state} {one.client} {' '.join(one.route)}".lower()


# ---- events --------------------------------------------------------------------------------------


def _event_style(event: Happened) -> Style:
    if event.kind in ("death", "error"):
        return "bad"
    return "warn" if event.kind in ("reroute", "rebuild", "preemption", "refusal") else "plain"


EVENTS: Final = Table[Happened](
    (
        Column("time", 8, lambda event: clock(event.at)),
        Column("what", 10, lambda event: event.kind),
        Column("where", 18, lambda event: event.where),
        Column("", 200, lambda event: f"{event.error}: {event.text}" if event.error else event.text),
    ),
    key=lambda event: f"{event.at} {event.serial}",
    style=_event_style,
)


def events(all_: Iterable[Happened], wanted: str) -> list[Happened]:
    """Return the events with `wanted` in them, the newest first."""
    chosen = [one for one in all_ if not wanted or wanted in f"{one.kind} {one.where} {one.error} {one.text}".lower()]
    return chosen[::-1]


# ---- drains --------------------------------------------------------------------------------------

DRAINS: Final = Table[DrainInfo](
    (
        Column("actor", 18, lambda one: one.name),
        Column("state", 9, lambda one: one.state),
        Column("left", -5, lambda one: str(one.left)),
        Column("moved", -5, lambda one: str(one.moved)),
        Column("finished", -8, lambda one: str(one.finished)),
        Column("parked", -6, lambda one: str(one.parked)),
        Column("time", 14, lambda one: f"{one.spent_ms / 1e3:.1f} of {one.timeout_ms / 1e3:g} s"),
        Column("asked by", 30, lambda one: one.asker),
    ),
    key=lambda one: one.name,
    style=lambda one: "warn" if one.state == "draining" else "bad" if one.state == "failed" else "plain",
)


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies of one step of a group of ranks, which `leader` drained at about `at` (Unix time)."""

    at: float
    leader: str
    step: GroupStep

    @property
    def slowest(self) -> int:
        """The rank whose reply came last, the leader aside."""
        others = range(1, len(self.step.drain_us))
        return max(others, key=lambda rank: self.step.drain_us[rank], default=0)

    @property
    def errors(self) -> list[str]:
        return [f"rank {rank}: {kind}" for rank, kind in enumerate(self.step.errors) if kind]


def _each(values: list[int]) -> str:
    return " ".join(f"{value:>7}" for value in values)


REPLIES: Final = Table[Replies](
    (
        Column("time", 8, lambda one: clock(one.at)),
        Column("leader", 12, lambda one: one.leader),
        Column("step", -7, lambda one: str(one.step.serial)),
        Column("rows", -4, lambda one: str(one.step.rows)),
        Column("fan-out", -7, lambda one: str(one.step.fan_out_us)),
        Column("slowest", -9, lambda one: f"{one.slowest}: {_of(one.step.drain_us, one.slowest)}"),
        Column("    drain µs of rank 0, 1, …", 31, lambda one: _each(one.step.drain_us)),
        Column("errors", 40, lambda one: ", ".join(one.errors)),
        Column("forward µs of rank 0, 1, …", 31, lambda one: _each(one.step.forward_us)),
        Column("sessions", -8, lambda one: str(one.step.sessions)),
        Column("operation", 16, lambda one: one.step.op),
    ),
    key=lambda one: f"{one.leader} {one.step.serial} {one.at}",
    style=lambda one: "bad" if one.errors else "plain",
)


def _of(values: list[int], place: int) -> int:
    return values[place] if place < len(values) else 0


def new_replies(cluster: Cluster, seen: dict[str, int], now: float) -> list[Replies]:
    """Return the steps that no earlier snapshot had, the oldest first. `seen` is the last serial of
    each leader, and is brought up to date."""
    found = []
    for actor in cluster.actors:
        recent = actor.group.recent if actor.group is not None else []
        if not recent:
            continue
        last = seen.get(actor.name, 0)
        if recent[-1].serial < last:
            last = 0  # the leader was started again
        seen[actor.name] = recent[-1].serial
        found += [Replies(round(now - step.age_ms / 1e3, 1), actor.name, step) for step in recent if step.serial > last]
    return sorted(found, key=lambda one: one.at)
