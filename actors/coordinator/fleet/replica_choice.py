"""Which replica of a stage a session takes. Pure."""

from collections.abc import Collection, Mapping, Sequence

from zrt.actors.coordinator.fleet.process_record import ProcessRecord
from zrt.runtime.messages.control import Address

ReplicaUse = Mapping[str, tuple[int, int]]
"""How many sessions run on each actor, by its name, and how many of them in the slot that is asked
for."""


def choose_replica(
    holders: Sequence[ProcessRecord], current: Collection[Address], use: ReplicaUse
) -> ProcessRecord | None:
    """Return the replica among a stage's `holders` that a session is to run through; None while
    none may take it.

    A session stays where it is (`current`) as long as that replica is ready, or drains and is the
    only one. Else it goes where the fewest sessions are, of equals where the fewest share its slot:
    so all slots spread over all replicas, and no stage waits for another.
    """
    ready = [record for record in holders if record.routable]
    stays = [record for record in ready or holders if record.serving and record.address in current]
    return min(stays or ready, key=lambda record: _preference(record, use), default=None)


def _preference(record: ProcessRecord, use: ReplicaUse) -> tuple[int, int, int, str]:
    return (*use.get(record.address.name, (0, 0)), record.load.sessions, record.address.name)
