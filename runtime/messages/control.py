"""The base of zrt's own messages between actors, and the parts they share. Each message is a
msgpack map whose `type` is the class name in snake_case.

members.py has the messages about processes, sessions.py those about sessions and their steps.
"""

from msgspec import Struct

from zrt.runtime.messages.header import U64, Label, Name


def snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Control(Struct, tag_field="type", tag=snake):
    """Base of zrt's own messages between actors."""


class Fault(Struct):
    """An error as a value: `kind` is one of errors.KINDS, `message` is for people, `where` names
    the actor or file."""

    kind: str
    message: str
    where: str = ""


class Address(Struct, frozen=True):
    """One process: its actor's name, its incarnation, and the endpoint of the ROUTER it binds."""

    name: Name
    incarnation: U64
    endpoint: Label


class Done(Control):
    """Reply to a request that has no other answer."""


class Failed(Control):
    """Reply to a request that failed, or to a message that did not decode."""

    fault: Fault
