"""The life of an actor's process: from its parent's lifeline to an exit status."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from typing import Final, NoReturn

import uvloop

from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.hard_exit import leave
from zrt.runtime.process.lifeline import Lifeline

log = logging.getLogger(__name__)

DOWN_STATUS: Final = 77
"""The exit status of a coordinator that brought its cluster down, for a parent that has not heard
of it."""
STOP_S: Final = 10.0
"""How long an actor may take to stop once it is told to end."""


def run_actor(make: Callable[[], Actor], lifeline: Lifeline) -> NoReturn:
    """Make an actor (heavy imports belong in `make`), run it on uvloop until it is told to end, and
    exit with its `status`. What is imported by then is exempt from garbage collection.

    The actor ends when its `ended` is set, or on SIGTERM or SIGINT; a second signal ends the
    process at once. An error before the actor is ready is told to the parent and raised. The exit
    does not wait for threads: an executor may be in the middle of a computation that nobody needs
    any more.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            actor = make()
            gc.collect()
            gc.freeze()  # else a collection looks through all that is imported: with torch 0.1 s, in the midst of a turn
            status = runner.run(_live(actor, lifeline))
        except ZrtError as error:
            lifeline.failed(error.kind, error.message, error.where)
            raise
        except Exception as error:
            lifeline.failed("internal", f"{type(error).__name__}: {error}")
            raise
        leave(status)


async def _live(actor: Actor, lifeline: Lifeline) -> int:
    actor.restarts = lifeline.restarts

    def told(number: signal.Signals) -> None:
        if actor.ended.is_set():
            os._exit(128 + number)
        actor.ended.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    await actor.start()
    log.info("%s: is reached at %s", actor.name, actor.endpoint)
    ended = asyncio.ensure_future(actor.ended.wait())
    there = asyncio.ensure_future(actor.there())
    await asyncio.wait({ended, there}, return_when=asyncio.FIRST_COMPLETED)
    there.cancel()
    if not actor.ended.is_set():
        lifeline.ready(actor.endpoint, actor.incarnation)
    await ended
    try:
        async with asyncio.timeout(STOP_S):
            await actor.stop()
    except TimeoutError:
        log.error("%s did not stop within %g s", actor.name, STOP_S)
    except Exception:
        log.exception("%s did not stop in good order", actor.name)
    else:
        return int(actor.failed) or actor.status
    return 1
