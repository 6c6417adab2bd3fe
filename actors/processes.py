"""The processes of `zrt actor KIND`: from command line words to a running actor. Heavy imports come after the lifeline is held."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zrt.runtime.config import Conf, endpoint, is_loopback
from zrt.runtime.errors import ZrtError
from zrt.runtime.lifeline import Lifeline, hold

if TYPE_CHECKING:
    from zrt.actors.coordinator import Coordinator


def run_block_server(
    name: str | None,
    *,
    join: str,
    device: str,
    threads: int | None,
    listen: str,
    advertise: str | None,
    insecure: bool,
) -> NoReturn:
    """A blank block server that joins the coordinator at `join`."""
    lifeline = _begin()
    if not insecure and not is_loopback(endpoint(listen)[0]):
        raise ZrtError(
            "bad_config", f"{listen} is open to other machines and nothing is encrypted: say --insecure to allow it"
        )
    from zrt.actors.block_server import BlockServer
    from zrt.runtime.process import run_actor

    def make() -> BlockServer:
        return BlockServer(
            name or f"block-server-{os.getpid()}",
            join=join,
            device=device,
            threads=threads or len(os.sched_getaffinity(0)),
            listen=listen,
            advertise=advertise,
        )

    run_actor(make, lifeline)


def run_coordinator(conf: Conf) -> NoReturn:
    """The coordinator of a cluster file; its model must have been fetched."""
    lifeline = _begin()
    from zrt.runtime.process import run_actor

    run_actor(lambda: _coordinator(conf), lifeline)


def _coordinator(conf: Conf) -> "Coordinator":
    from zrt.actors.coordinator import Coordinator
    from zrt.runtime.compute.spec import read_spec
    from zrt.runtime.models import resolve
    from zrt.runtime.prompts import Prompts

    folder: Path = resolve(conf.model.ref, weights=conf.model.weights == "files")
    spec = read_spec(folder)
    return Coordinator(conf, folder, spec, Prompts(folder, spec, min(conf.model.context, spec.max_positions)))


def _begin() -> Lifeline:
    lifeline = hold()
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    return lifeline
