"""What each command does; `arguments` are its words (main.py), and what comes back is its exit
status.

Commands import what they need when they run: `zrt status` waits for nothing that only `zrt up`
needs.
"""

import argparse
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from zrt.runtime.errors import ZrtError

if TYPE_CHECKING:
    from zrt.runtime.cli.asking import Question
    from zrt.runtime.cluster.file_schema import Conf

SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop", "stop_token_ids", "logprobs", "seed", "n"),
)
"""Client.generate's options, as `arguments` holds them."""


def _question(arguments: argparse.Namespace) -> "Question":
    from zrt.runtime.cli.asking import Question

    prompt = arguments.prompt
    if (prompt is None) == (arguments.token_ids is None):
        raise ZrtError("bad_config", "give a text or --token-ids, and not both")
    if arguments.logprobs is not None and not arguments.json:
        raise ZrtError("bad_config", "--logprobs goes with --json")
    if prompt == "-":
        prompt = _standard_input()
    return Question(
        prompt=prompt,
        token_ids=arguments.token_ids,
        raw=arguments.raw,
        json=arguments.json,
        sampling=_sampling(arguments),
    )


def _standard_input() -> str:
    """All of it, less the end of its last line, as a shell hands on what a command says."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ZrtError("bad_config", f"standard input is not UTF-8 at byte {error.start}") from None


def _sampling(arguments: argparse.Namespace) -> dict[str, object]:
    """What was given of Client.generate's options."""
    given = {name: value for name in SAMPLING if (value := getattr(arguments, name, None)) not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
        if len(given["logit_bias"]) < len(arguments.logit_bias):
            raise ZrtError("bad_config", "--logit-bias names a token twice")
    return given


def _run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    from zrt.runtime.process.terminal import Foreground

    with Foreground() as foreground:
        return foreground.run(work)


def up(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.lifeline import hold
    from zrt.runtime.process.terminal import interruptible

    lifeline = hold()
    interruptible()
    from zrt.actors.node import node
    from zrt.runtime.cli import actor_commands, detach, log_lines, preflight
    from zrt.runtime.process import stderr

    conf = log_lines.as_told(_conf(arguments))
    if not arguments.detach:
        stderr.wait_for_no_reader()
        log_lines.write(conf.log.format, detached=arguments.log)
    asks = arguments.prompt is not None or arguments.token_ids is not None
    if asks and arguments.detach:
        raise ZrtError("bad_config", "--prompt asks once and brings the cluster down: it does not go with --detach")
    if not asks and (arguments.raw or arguments.json or _sampling(arguments)):
        raise ZrtError("bad_config", "the options of an answer go with --prompt or --token-ids")
    question = _question(arguments) if asks else None
    preflight.prepare(conf)
    if arguments.detach:
        return detach.detach(conf.cluster.name, _cluster_words_again(arguments))
    options = actor_commands.cluster_options(arguments)
    return _run(lambda: node.up(conf, options, question, lifeline, detached=arguments.log))


def _conf(arguments: argparse.Namespace) -> "Conf":
    from zrt.runtime.cluster import file_loader

    return file_loader.override(
        file_loader.load(arguments.conf),
        model=arguments.model,
        stages=arguments.stages,
        tp=arguments.tp,
        listen=getattr(arguments, "listen", None),
        advertise=getattr(arguments, "advertise", None),
        insecure=getattr(arguments, "insecure", False),
    )


def _cluster_words_again(arguments: argparse.Namespace) -> list[str]:
    """The words that name this cluster file and its overrides, for another command."""
    again = [str(arguments.conf)] if arguments.conf is not None else []
    if arguments.model is not None:
        again += ["--model", arguments.model]
    if arguments.stages is not None:
        again += ["--stages", str(arguments.stages)]
    if arguments.tp is not None:
        again += ["--tp", str(arguments.tp)]
    if arguments.listen is not None:
        again += ["--listen", arguments.listen]
    if arguments.advertise is not None:
        again += ["--advertise", arguments.advertise]
    if arguments.insecure:
        again += ["--insecure"]
    return again


def generate(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    question = _question(arguments)
    return _run(lambda: asking.ask_once(arguments.connect, question))


def chat(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    return asking.chat(arguments.connect, _sampling(arguments))


def status(arguments: argparse.Namespace) -> int:
    from zrt.tui.status import status

    try:
        return _run(lambda: status(arguments.connect, json=arguments.json, watch=arguments.watch))
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0  # it is how a watch ends


def top(arguments: argparse.Namespace) -> int:
    from zrt.runtime.client.client import find_endpoint

    endpoint = find_endpoint(arguments.connect)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ZrtError("bad_config", "`zrt top` needs a terminal; `zrt status --watch --json` is for scripts")
    from zrt.tui.app import run

    return run(endpoint)


def cancel(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    return _run(lambda: asking.cancel(arguments.connect, arguments.session))


def drain(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    return _run(lambda: asking.drain(arguments.connect, arguments.name, arguments.timeout))


def undrain(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    return _run(lambda: asking.undrain(arguments.connect, arguments.name))


def down(arguments: argparse.Namespace) -> int:
    from zrt.runtime.cli import asking

    return _run(lambda: asking.down(arguments.connect, arguments.timeout))


def plan(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.cli import preflight

    return preflight.plan(_conf(arguments), json=arguments.json)


def check(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.cli import preflight

    def trial(tp: int) -> ZrtError | None:
        from zrt.actors.block_server.tensor_parallel.trial import try_group

        return try_group(tp, arguments.device)

    return preflight.check(arguments.model, json=arguments.json, tp=arguments.tp, trial=trial)


def fetch(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import interruptible

    interruptible()
    from zrt.runtime.cli.progress import Bars
    from zrt.runtime.models.fetch.resolve import resolve

    with Bars() as bars:
        folder = resolve(arguments.model, progress=bars.update)
    print(folder)
    return 0
