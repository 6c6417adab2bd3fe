"""`zrt …`: the words of the command line, and where each goes. Answers go to stdout, progress and errors to stderr.

Exit status: 0 done, 1 the work failed (the error's kind on stderr), 2 the words or the cluster file are off.
Commands import what they need when they run: `zrt status` waits for nothing that only `zrt up` needs.
"""

import argparse
import asyncio
import sys
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from zrt.runtime.errors import ZrtError

if TYPE_CHECKING:
    from zrt.runtime.asking import Question
    from zrt.runtime.config import Conf

WORDS_OFF = frozenset({"bad_config"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ZrtError as error:
        print(f"zrt: {error}", file=sys.stderr)
        return 2 if error.kind in WORDS_OFF else 1
    except KeyboardInterrupt:
        print("zrt: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our answer went away: nothing is left to say to anyone
        return 1


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="zrt", description="One large language model over several processes, GPUs and machines."
    )
    top.add_argument("--version", action="version", version=f"zrt {version('zrt')}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="bring a cluster up and stay with it", description=_UP)
    _cluster_words(up)
    up.add_argument("--detach", action="store_true", help="return when the cluster is ready; it runs on")
    up.add_argument("--prompt", metavar="TEXT", help="ask once, stream the answer, bring the cluster down")
    _generate_words(up)
    up.set_defaults(run=_up)

    generate = commands.add_parser("generate", help="stream one answer")
    generate.add_argument("prompt", metavar="TEXT", nargs="?", help="what to ask; '-' reads it from standard input")
    _generate_words(generate)
    _connect_words(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk, turn by turn")
    _sampling_words(chat)
    _connect_words(chat)
    chat.set_defaults(run=_chat)

    status = commands.add_parser("status", help="show the cluster's processes and sessions")
    status.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _connect_words(status)
    status.set_defaults(run=_status)

    cancel = commands.add_parser("cancel", help="end a session")
    cancel.add_argument("session", metavar="SESSION", help="its id, as `zrt status` shows it")
    _connect_words(cancel)
    cancel.set_defaults(run=_cancel)

    fetch = commands.add_parser("fetch", help="download a model into the cache")
    fetch.add_argument("model", metavar="MODEL", help="a demo name, a folder, or a hub id")
    fetch.set_defaults(run=_fetch)

    down = commands.add_parser("down", help="bring the cluster down")
    _connect_words(down)
    down.set_defaults(run=_down)

    actor = commands.add_parser("actor", help="start one process by hand")
    kinds = actor.add_subparsers(required=True, metavar="KIND")
    server = kinds.add_parser("block-server", help="a block server: blank until the coordinator gives it blocks")
    server.add_argument(
        "--join", metavar="ENDPOINT", required=True, help="the coordinator's, such as tcp://10.0.0.1:7411"
    )
    server.add_argument("--name", help="default: block-server-PID")
    server.add_argument("--device", default="cpu", help="cpu, cuda:0, … (default: cpu)")
    server.add_argument("--threads", type=_positive, help="CPU threads for products (default: the cores)")
    server.add_argument("--listen", default="tcp://127.0.0.1:0", help="where it binds (default: loopback, any port)")
    server.add_argument("--advertise", metavar="HOST", help="the host name others reach it by")
    server.add_argument("--insecure", action="store_true", help="allow an interface other than loopback, without keys")
    server.set_defaults(run=_block_server)
    coordinator = kinds.add_parser("coordinator", help="the coordinator of a cluster file")
    _cluster_words(coordinator)
    coordinator.set_defaults(run=_coordinator)
    return top


_UP = """Start a coordinator and the block servers of a cluster file, and stay until Ctrl-C or `zrt down`."""


def _cluster_words(command: argparse.ArgumentParser) -> None:
    command.add_argument("conf", metavar="CONF", nargs="?", type=Path, help="a cluster file (default: conf/local.toml)")
    command.add_argument("--model", metavar="REF", help="a demo name, a folder, or a hub id; in place of the file's")
    command.add_argument("--stages", type=_positive, metavar="N", help="N planned stages in place of the file's")


def _connect_words(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--connect", metavar="ENDPOINT", help="the cluster's (default: $ZRT_ENDPOINT, or the last one started here)"
    )


def _sampling_words(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=_positive, metavar="N")
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    command.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    command.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    command.add_argument("--seed", type=int, metavar="N", help="default: drawn, and reported")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _generate_words(command: argparse.ArgumentParser) -> None:
    _sampling_words(command)
    command.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    command.add_argument("--token-ids", type=_ids, metavar="1,2,3", help="token ids in place of a text")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the stream")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,3") from None
    if any(token < 0 for token in ids):
        raise argparse.ArgumentTypeError("token ids are 0 or more")
    return ids


def _run(work: Coroutine[object, object, int]) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _up(arguments: argparse.Namespace) -> int:
    from zrt.runtime import up

    conf = _conf(arguments)
    asks = arguments.prompt is not None or arguments.token_ids is not None
    if asks and arguments.detach:
        raise ZrtError("bad_config", "--prompt asks once and brings the cluster down: it does not go with --detach")
    question = _question(arguments) if asks else None
    up.prepare(conf)
    words = _cluster_words_again(arguments)
    return up.detach(words) if arguments.detach else _run(up.up(conf, words, question))


def _conf(arguments: argparse.Namespace) -> "Conf":
    from zrt.runtime import config

    return config.override(config.load(arguments.conf), model=arguments.model, stages=arguments.stages)


def _cluster_words_again(arguments: argparse.Namespace) -> list[str]:
    """The words that name this cluster file and its overrides, for another command."""
    words = [str(arguments.conf)] if arguments.conf is not None else []
    if arguments.model is not None:
        words += ["--model", arguments.model]
    if arguments.stages is not None:
        words += ["--stages", str(arguments.stages)]
    return words


def _question(arguments: argparse.Namespace) -> "Question":
    from zrt.runtime.asking import Question

    prompt = arguments.prompt
    if (prompt is None) == (arguments.token_ids is None):
        raise ZrtError("bad_config", "give either a text or --token-ids")
    if prompt == "-":
        prompt = sys.stdin.read()
    return Question(
        prompt=prompt,
        token_ids=arguments.token_ids,
        raw=arguments.raw,
        json=arguments.json,
        sampling=_sampling(arguments),
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, object]:
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) not in (None, [])}


def _generate(arguments: argparse.Namespace) -> int:
    from zrt.runtime import asking

    return _run(asking.ask_once(arguments.connect, _question(arguments)))


def _chat(arguments: argparse.Namespace) -> int:
    from zrt.runtime import asking

    return _run(asking.chat(arguments.connect, _sampling(arguments)))


def _status(arguments: argparse.Namespace) -> int:
    from zrt.runtime import asking

    return _run(asking.status(arguments.connect, as_json=arguments.json))


def _cancel(arguments: argparse.Namespace) -> int:
    from zrt.runtime import asking

    try:
        session = int(arguments.session, 16)
    except ValueError:
        raise ZrtError("bad_config", f"{arguments.session!r} is not a session id: `zrt status` shows them") from None
    return _run(asking.cancel(arguments.connect, session))


def _down(arguments: argparse.Namespace) -> int:
    from zrt.runtime import asking

    return _run(asking.down(arguments.connect))


def _fetch(arguments: argparse.Namespace) -> int:
    from zrt.runtime.models import resolve
    from zrt.runtime.show import Bars

    with Bars() as bars:
        folder = resolve(arguments.model, progress=bars.update)
    print(folder)
    return 0


def _block_server(arguments: argparse.Namespace) -> int:
    from zrt.actors.processes import run_block_server

    return run_block_server(
        arguments.name,
        join=arguments.join,
        device=arguments.device,
        threads=arguments.threads,
        listen=arguments.listen,
        advertise=arguments.advertise,
        insecure=arguments.insecure,
    )


def _coordinator(arguments: argparse.Namespace) -> int:
    from zrt.actors.processes import run_coordinator

    return run_coordinator(_conf(arguments))


if __name__ == "__main__":
    sys.exit(main())
