"""The entry point of every actor's process: `python -m zrt.actors.main KIND [--name NAME] OPTIONS`,
as a parent starts it (options.py), or `zrt actor KIND`, as a person does.

The lifeline is held first. Whatever else a kind of actor needs is imported when one is to run: the
coordinator never loads torch.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, cast

from zrt.actors.options import (
    ActorOptions,
    BlockServerOptions,
    ComputeOptions,
    CoordinatorOptions,
    LayerWorkerOptions,
    MemberOptions,
    RankOptions,
    from_words,
)
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.lifeline import Lifeline, hold
from zrt.runtime.process.terminal import all_descriptors, open_streams, say

if TYPE_CHECKING:
    from zrt.runtime.actor.actor import Actor


class Kind(NamedTuple):
    """A kind of actor: the type of its options, and the module whose `make(options)` returns the
    actor."""

    options: type[ActorOptions]
    module: str


class _Maker(Protocol):
    def make(self, options: ActorOptions) -> "Actor": ...


KINDS: Final = {
    "coordinator": Kind(CoordinatorOptions, "zrt.actors.coordinator.coordinator"),
    "block-server": Kind(BlockServerOptions, "zrt.actors.block_server.block_server"),
    "layer-worker": Kind(LayerWorkerOptions, "zrt.actors.layer_worker.layer_worker"),
    "tp-rank": Kind(RankOptions, "zrt.actors.tp_rank.tp_rank"),
}


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the actor that a parent's command line names. Exit status 2: the command line or the
    cluster file is wrong; 1: the actor could not start, or was interrupted before it had."""
    try:
        _main(arguments, hold())
    except KeyboardInterrupt:
        sys.exit("zrt: interrupted")
    except BrokenPipeError:  # nobody reads stderr
        sys.exit(1)


def _main(arguments: Sequence[str], lifeline: Lifeline) -> NoReturn:
    open_streams()
    all_descriptors()
    try:
        if not arguments or arguments[0] not in KINDS:
            raise ValueError(f"the first word is none of {', '.join(KINDS)}")
        options = from_words(arguments, KINDS[arguments[0]].options)
    except ValueError as error:
        lifeline.failed("bad_config", str(error))
        usage = "usage: python -m zrt.actors.main KIND [--name NAME] OPTIONS (by hand: zrt actor KIND)"
        say(f"{usage}: {error}")
        sys.exit(2)
    try:
        run(options, lifeline)
    except ZrtError as error:  # without a parent that could say it
        say(f"zrt: {error}")
        sys.exit(2 if error.kind == "bad_config" else 1)


def run(options: ActorOptions, lifeline: Lifeline) -> NoReturn:
    """Run an actor until it is told to end, and leave with its exit status. ZrtError: the actor
    could not start, and no parent waits to hear why."""
    if lifeline.awaited:
        os.set_blocking(sys.stderr.fileno(), False)  # a pipe of our own

    def make() -> "Actor":
        lines = log_to_stderr(alone=not lifeline.awaited)
        actor = _make(options)
        lines.actor = actor.name
        return actor

    from zrt.runtime.actor.actor_process import run_actor
    from zrt.runtime.process.logs import log_to_stderr

    try:
        run_actor(make, lifeline)
    except ZrtError:
        if lifeline.awaited:  # the parent hears of the fault, and says it better than we
            sys.exit(1)
        raise


def _make(options: ActorOptions) -> "Actor":
    if isinstance(options, ComputeOptions):
        _prepare_to_compute(options)
    module: Any = import_module(KINDS[options.kind].module)
    return cast(_Maker, module).make(options)


def _prepare_to_compute(options: ComputeOptions) -> None:
    """Check what can be checked before the actor is made, and import what its device needs.

    ZrtError bad_config: other machines could reach the actor, and nothing is encrypted;
    unsupported: there is no such device.
    """
    _refuse_open(options.listen, isinstance(options, MemberOptions) and options.insecure)
    from zrt.runtime.compute.threads import thread_environment

    # Before torch is imported: its threads are to wait for each other as they should, whoever
    # started this process.
    for name, value in thread_environment(options.num_threads).items():
        os.environ.setdefault(name, value)
    from zrt.runtime.compute.devices import check_device

    check_device(options.device)
    if options.device.startswith("cuda"):
        import_module("zrt.runtime.compute.cuda.gpu_forward")


def _refuse_open(listen: str, insecure: bool) -> None:
    """Raise ZrtError bad_config for an endpoint that other machines reach, unless `insecure` allows
    that."""
    from zrt.runtime.endpoints import endpoint, is_loopback

    try:
        host, _ = endpoint(listen)
    except ValueError as error:
        raise ZrtError("bad_config", str(error)) from None
    if not insecure and not is_loopback(host):
        text = f"{listen} is open to other machines and nothing is encrypted: say --insecure (in a cluster file insecure = true)"
        raise ZrtError("bad_config", text)


if __name__ == "__main__":
    main(sys.argv[1:])
