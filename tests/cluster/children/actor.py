"""An actor's process as `zrt actor KIND` runs one. Words: `good`, `stubborn` (does not stop),
`great` (says what a collection looks at), `taken=ENDPOINT`, `bug`."""

import asyncio
import gc
import sys

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.actor_process import run_actor
from zrt.runtime.process.lifeline import hold


class Stubborn(Actor):
    async def stop(self) -> None:
        print("is told to stop", flush=True)
        await asyncio.Event().wait()


class Great(Actor):
    async def there(self) -> None:
        kept = [[] for _ in range(1000)]
        print(f"looks at {len(gc.get_objects()) // 1000} thousand of {gc.get_freeze_count() // 1000}", flush=True)
        kept.clear()


def make() -> Actor:
    verb, _, argument = sys.argv[1].partition("=")
    match verb:
        case "stubborn":
            return Stubborn("stubborn")
        case "great":
            import torch  # noqa: F401

            return Great("great")
        case "taken":
            return Actor("taken", listen=argument)
        case "bug":
            raise ZeroDivisionError("by zero")
    return Actor("good")


run_actor(make, hold())
