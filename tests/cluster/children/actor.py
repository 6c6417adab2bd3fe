"""An actor's process as `zrt actor KIND` runs one. Words: `good`, `stubborn` (does not stop), `taken=ENDPOINT`, `bug`."""

import asyncio
import sys

from zrt.runtime.actor import Actor
from zrt.runtime.lifeline import hold
from zrt.runtime.process import run_actor


class Stubborn(Actor):
    async def stop(self) -> None:
        print("is told to stop", flush=True)
        await asyncio.Event().wait()


def make() -> Actor:
    verb, _, argument = sys.argv[1].partition("=")
    match verb:
        case "stubborn":
            return Stubborn("stubborn")
        case "taken":
            return Actor("taken", listen=argument)
        case "bug":
            raise ZeroDivisionError("by zero")
    return Actor("good")


run_actor(make, hold())
