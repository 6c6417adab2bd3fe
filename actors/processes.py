"""The processes of `zrt actor KIND`: from command line words to a running actor. Heavy imports come after the lifeline is held."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zrt.runtime.errors import ZrtError
from zrt.runtime.lifeline import READY_FD, hold

if TYPE_CHECKING:
    from zrt.actors.block_server import BlockServer
    from zrt.actors.coordinator import Coordinator
    from zrt.runtime.actor import Actor


def run_block_server(
    name: str | None,
    *,
    join: str,
    device: str,
    threads: int | None,
    shared_threads: int | None,
    listen: str,
    advertise: str | None,
    insecure: bool,
    memory: int,
) -> NoReturn:
    """A blank block server that joins the coordinator at `join`."""

    def make() -> "BlockServer":
        _guard(listen, insecure)
        from zrt.actors.block_server import BlockServer

        alone = threads or len(os.sched_getaffinity(0))
        return BlockServer(
            name or f"block-server-{os.getpid()}",
            join=join,
            device=device,
            threads=(alone, shared_threads or alone),
            listen=listen,
            advertise=advertise,
            memory_bytes=memory,
        )

    _run(make)


def run_coordinator(path: Path | None, *, model: str | None, stages: int | None, listen: str | None) -> NoReturn:
    """The coordinator of a cluster file with these overrides; its model must have been fetched."""

    def make() -> "Coordinator":
        import msgspec

        from zrt.actors.coordinator import Coordinator
        from zrt.runtime import config
        from zrt.runtime.compute.spec import read_spec
        from zrt.runtime.models import resolve
        from zrt.runtime.prompts import Prompts

        conf = config.override(config.load(path), model=model, stages=stages)
        if listen is not None:
            _guard(listen, conf.cluster.insecure)
            conf = msgspec.structs.replace(conf, cluster=msgspec.structs.replace(conf.cluster, listen=listen))
        folder = resolve(conf.model.ref, weights=conf.model.weights == "files")
        spec = read_spec(folder)
        return Coordinator(conf, folder, spec, Prompts(folder, spec, min(conf.model.context, spec.max_positions)))

    _run(make)


def _run(make: Callable[[], "Actor"]) -> NoReturn:
    told = READY_FD in os.environ  # a parent hears of a fault, and says it better than we
    lifeline = hold()
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    from zrt.runtime.process import run_actor

    try:
        run_actor(make, lifeline)
    except ZrtError:
        if told:
            sys.exit(1)
        raise


def _guard(listen: str, insecure: bool) -> None:
    """ZrtError bad_config: other machines could reach us, and nothing is encrypted."""
    from zrt.runtime.config import endpoint, is_loopback

    try:
        host, _ = endpoint(listen)
    except ValueError as error:
        raise ZrtError("bad_config", str(error)) from None
    if not insecure and not is_loopback(host):
        text = f"{listen} is open to other machines and nothing is encrypted: say --insecure (in a cluster file insecure = true)"
        raise ZrtError("bad_config", text)
