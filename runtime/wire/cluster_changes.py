"""Differences between snapshots of a cluster: computed by the coordinator, applied to the last
snapshot by a client. Pure.

The rules are those of the message `Changes` in messages/client.py.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Changes, Cluster
from zrt.runtime.messages.cluster import GAPS, ActorInfo, SessionInfo, pipeline_order

_OWN: Final = tuple(name for name in Cluster.__struct_fields__ if name not in ("id", "actors", "sessions", "happened"))
_ACTOR: Final = ActorInfo.__struct_fields__
_SESSION: Final = tuple(name for name in SessionInfo.__struct_fields__ if name != "gaps_ms")

T = TypeVar("T", bound=Struct)


def between(old: Cluster, new: Cluster) -> Changes:
    """Return the changes from `old` to `new`. All of `new.happened` is included; the caller sets
    `id` and `serial`."""
    actors: dict[str, dict[str, Any] | None] = {}
    known = {actor.name: actor for actor in old.actors}
    for actor in new.actors:
        if fields := _fields(known.pop(actor.name, None), actor, _ACTOR):
            actors[actor.name] = fields
    actors |= dict.fromkeys(known)
    sessions: dict[int, dict[str, Any] | None] = {}
    living = {session.session: session for session in old.sessions}
    for session in new.sessions:
        last = living.pop(session.session, None)
        fields = _fields(last, session, _SESSION)
        if last is None:
            fields["gaps_ms"] = session.gaps_ms
        elif session.gaps_ms != last.gaps_ms:
            fields |= _gaps(last.gaps_ms, session.gaps_ms, session.completion_tokens - last.completion_tokens)
        if fields:
            sessions[session.session] = fields
    sessions |= dict.fromkeys(living)
    return Changes(
        id="", serial=0, cluster=_fields(old, new, _OWN), actors=actors, sessions=sessions, happened=new.happened
    )


def _fields(old: Struct | None, new: Struct, names: tuple[str, ...]) -> dict[str, Any]:
    if old is None:
        return {name: getattr(new, name) for name in names}
    return {name: value for name in names if (value := getattr(new, name)) != getattr(old, name)}


def _gaps(old: list[float], new: list[float], tokens: int) -> dict[str, list[float]]:
    """Return a field with the gaps of the last `tokens` tokens, if the others are those of `old`;
    else with all."""
    fresh = new[-tokens:] if tokens > 0 else []
    return {"new_gaps_ms": fresh} if [*old, *fresh][-GAPS:] == new else {"gaps_ms": new}


class Snapshots:
    """The snapshots that a subscription's events make, one after the other."""

    def __init__(self) -> None:
        self._last: Cluster | None = None
        self._serial = 0

    def take(self, event: Cluster | Changes) -> Cluster | None:
        """Return the cluster after this event; None if events were missed, until the next whole
        `cluster`.

        Processes and sessions that did not change are the same objects as before. ZrtError
        bad_request: the changes do not apply to this cluster.
        """
        if isinstance(event, Cluster):
            self._last, self._serial = event, 0
            return event
        last, self._last = self._last, None
        if last is None or event.serial != self._serial + 1:
            return None
        try:
            self._last = _applied(last, event)
        except (msgspec.ValidationError, TypeError) as error:
            raise ZrtError("bad_request", f"the changes to the cluster cannot be applied: {error}") from None
        self._serial = event.serial
        return self._last


def _applied(last: Cluster, event: Changes) -> Cluster:
    actors = {actor.name: actor for actor in last.actors}
    for name, fields in event.actors.items():
        if fields is None:
            actors.pop(name, None)
        else:
            actors[name] = _changed(actors.get(name), fields, ActorInfo)
    sessions = {session.session: session for session in last.sessions}
    for session, fields in event.sessions.items():
        if fields is None:
            sessions.pop(session, None)
            continue
        before = sessions.get(session)
        if "new_gaps_ms" in fields:
            fields = dict(fields)
            fresh = fields.pop("new_gaps_ms")
            fields["gaps_ms"] = [*(before.gaps_ms if before is not None else ()), *fresh][-GAPS:]
        sessions[session] = _changed(before, fields, SessionInfo)
    made = _changed(last, event.cluster, Cluster)
    made.actors = sorted(actors.values(), key=pipeline_order)
    made.sessions = list(sessions.values())
    made.happened = event.happened
    return made


def _changed(last: T | None, fields: Mapping[str, Any], kind: type[T]) -> T:
    """Return a copy of `last`, or a new struct where that is None, with these fields, checked."""
    if last is None:
        return msgspec.convert(fields, kind)
    made = msgspec.structs.replace(last)
    for name, value in fields.items():
        if (type_ := _TYPES[kind].get(name)) is not None:  # else the field is a newer coordinator's
            setattr(made, name, value if type(value) is type_ else msgspec.convert(value, type_))
    return made


_TYPES: Final[dict[type[Struct], dict[str, Any]]] = {
    kind: {field.name: field.type for field in msgspec.structs.fields(kind)}
    for kind in (ActorInfo, SessionInfo, Cluster)
}
