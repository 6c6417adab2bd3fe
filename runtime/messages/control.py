"""The base of zrt's own messages between actors, and what any of them carries. Each is a msgpack
map whose `type` is the class name in snake_case.

members.py has those about processes, sessions.py those about sessions and their steps.
"""

from msgspec import Struct

from zrt.runtime.messages.header import U64, Label, Name


def snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Control(Struct, tag_field="type", tag=snake):
    """Base of the messages below."""


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
    """The reply to a question that has nothing else to say."""


class Failed(Control):
    """The reply to a question that could not be answered, or to a message that did not decode."""

    fault: Fault
