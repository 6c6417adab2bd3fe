"""The processes of `zrt actor KIND`: from command line words to a running actor. Heavy imports come
after the lifeline is held."""

import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from zrt.runtime.errors import ZrtError
from zrt.runtime.process.lifeline import READY_FD, hold
from zrt.runtime.process.logs import log_to_stderr

if TYPE_CHECKING:
    from zrt.actors.block_server.block_server import BlockServer
    from zrt.actors.coordinator.coordinator import Coordinator
    from zrt.actors.layer_worker.layer_worker import LayerWorker
    from zrt.actors.tp_rank.tp_rank import TpRank
    from zrt.runtime.actor.actor import Actor
    from zrt.runtime.cluster.file_schema import Conf


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
    cluster: str,
    memory: int,
) -> NoReturn:
    """A blank block server that joins the coordinator at `join`."""

    def make() -> "BlockServer":
        _guard(listen, insecure)
        alone = _threads(threads)
        from zrt.actors.block_server.block_server import BlockServer

        _import_for(device)
        return BlockServer(
            name or f"block-server-{os.getpid()}",
            join=join,
            device=device,
            threads=(alone, shared_threads or alone),
            listen=listen,
            advertise=advertise,
            cluster=cluster,
            memory_bytes=memory,
        )

    _run(make)


def run_coordinator(read: Callable[[], "Conf"], *, port_s: float, cluster: str) -> NoReturn:
    """The coordinator of the cluster file that `read` reads; its model must have been fetched.
    `cluster` is the cluster's id, empty for a new one. `port_s` is how long it waits for its port,
    should it be taken."""

    def make() -> "Coordinator":
        from zrt.actors.coordinator.coordinator import Coordinator
        from zrt.actors.coordinator.sessions.requests import Requests
        from zrt.runtime.models.architecture.spec import read_spec
        from zrt.runtime.models.fetch.resolve import resolve

        conf = read()
        folder = resolve(conf.model.ref, weights=conf.model.weights == "files")
        spec = read_spec(folder)
        prompts = Requests(folder, spec, min(conf.model.context, spec.max_positions))
        return Coordinator(conf, folder, spec, prompts, cluster=cluster, port_s=port_s)

    _run(make)


def run_tp_rank(name: str | None, *, rank: int, world: int, device: str, threads: int | None, listen: str) -> NoReturn:
    """A rank of a tensor-parallel group, which waits for its leader."""

    def make() -> "TpRank":
        _guard(listen, False)
        count = _threads(threads)
        from zrt.actors.tp_rank.tp_rank import TpRank

        _import_for(device)
        return TpRank(
            name or f"rank{rank}-{os.getpid()}",
            rank=rank,
            world=world,
            device=device,
            threads=count,
            listen=listen,
        )

    _run(make)


def run_worker(
    name: str | None,
    *,
    join: str,
    device: str,
    threads: int | None,
    listen: str,
    advertise: str | None,
    insecure: bool,
    cluster: str,
    memory: int,
) -> NoReturn:
    """A layer worker, which waits for a master. What it is sent of a model is kept in the cache."""

    def make() -> "LayerWorker":
        _guard(listen, insecure)
        count = _threads(threads)
        from zrt.actors.layer_worker.layer_worker import LayerWorker
        from zrt.runtime.paths import home

        _import_for(device)
        return LayerWorker(
            name or f"worker-{socket.gethostname()}-{os.getpid()}",
            join=join,
            cache=home() / "layers",
            device=device,
            threads=count,
            listen=listen,
            advertise=advertise,
            cluster=cluster,
            memory_bytes=memory,
        )

    _run(make)


def _run(make: Callable[[], "Actor"]) -> NoReturn:
    told = READY_FD in os.environ  # a parent hears of a fault, and says it better than we
    lifeline = hold()
    if told:
        os.set_blocking(sys.stderr.fileno(), False)  # a pipe of our own

    def named() -> "Actor":
        lines = log_to_stderr(alone=not told)
        actor = make()
        lines.actor = actor.name
        return actor

    from zrt.runtime.actor.actor_process import run_actor

    try:
        run_actor(named, lifeline)
    except ZrtError:
        if told:
            sys.exit(1)
        raise


def _threads(given: int | None) -> int:
    """How many to compute with; before torch is imported, so that they wait for each other as they
    should whoever started the process."""
    from zrt.runtime.compute.threads import thread_environment

    threads = given or len(os.sched_getaffinity(0))
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)
    return threads


def _import_for(device: str) -> None:
    """What computing there takes, before the process begins: see `run_actor`. ZrtError unsupported:
    there is no such device."""
    from zrt.runtime.compute.devices import check_device

    check_device(device)
    if device.startswith("cuda"):
        import zrt.runtime.compute.cuda.gpu_forward  # noqa: F401


def _guard(listen: str, insecure: bool) -> None:
    """ZrtError bad_config: other machines could reach us, and nothing is encrypted."""
    from zrt.runtime.endpoints import endpoint, is_loopback

    try:
        host, _ = endpoint(listen)
    except ValueError as error:
        raise ZrtError("bad_config", str(error)) from None
    if not insecure and not is_loopback(host):
        text = f"{listen} is open to other machines and nothing is encrypted: say --insecure (in a cluster file insecure = true)"
        raise ZrtError("bad_config", text)
