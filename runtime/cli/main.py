"""`zrt …`: the words of the command line, and where each goes. Answers go to stdout, progress and
errors to stderr.

Exit status: 0 done, 1 the work failed (the error's kind on stderr), 2 the words or the cluster file
are off. What they do is in commands.py.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zrt.runtime.cli import actor_commands, argument_types, commands
from zrt.runtime.errors import ZrtError

WORDS_OFF = frozenset({"bad_config"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    try:
        arguments = parser().parse_args(argv)
        from zrt.runtime.process.terminal import all_descriptors, mute, open_streams

        open_streams()
        all_descriptors()
        try:
            return _obey(arguments)
        except BrokenPipeError:  # whoever read our answer went away
            mute(sys.stdout)
            return 1
    except KeyboardInterrupt:
        print("zrt: interrupted", file=sys.stderr)
        return 1


def _obey(arguments: argparse.Namespace) -> int:
    from zrt.runtime.process.terminal import say

    try:
        return int(arguments.run(arguments))
    except ZrtError as error:
        if getattr(arguments, "json", False):
            from zrt.runtime.cli.asking import as_json

            print(as_json(error={"kind": error.kind, "message": error.message}), flush=True)
        say(f"zrt: {error}")
        return 2 if error.kind in WORDS_OFF else 1


class _Parser(argparse.ArgumentParser):
    """Of one command: what it does not know it refuses with its own usage, rather than hand it back
    to `zrt`. Options are said in full."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = _Parser(
        prog="zrt",
        description="One large language model over several processes, GPUs and machines.",
        epilog="`zrt COMMAND --help` tells more. Exit status: 0 done, 1 it failed (the reason is on stderr), "
        "2 the words or the cluster file are off.",
    )
    top.add_argument("--version", action=_Version)
    subs = top.add_subparsers(required=True, metavar="COMMAND")

    up = _command(subs, "up", commands.up, "bring a cluster up and stay with it", _UP)
    _cluster_words(up)
    _listen_words(up)
    up.add_argument("--detach", action="store_true", help="return when the cluster is ready; it runs on")
    up.add_argument("--log", action="store_true", help=argparse.SUPPRESS)  # what --detach starts writes one
    up.add_argument(
        "--prompt",
        type=argument_types.text,
        metavar="TEXT",
        help="ask once, stream the answer, bring the cluster down; '-' reads it from standard input",
    )
    _generate_words(up)

    generate = _command(subs, "generate", commands.generate, "stream one answer", _GENERATE)
    generate.add_argument(
        "prompt",
        type=argument_types.text,
        metavar="TEXT",
        nargs="?",
        help="what to ask; '-' reads it from standard input",
    )
    _generate_words(generate)
    _connect_words(generate)

    chat = _command(subs, "chat", commands.chat, "talk, turn by turn", _CHAT)
    _sampling_words(chat)
    _connect_words(chat)

    status = _command(subs, "status", commands.status, "show the cluster's processes and sessions")
    status.add_argument("--json", action="store_true", help="one JSON object on stdout; with --watch, one a line")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    _connect_words(status)

    monitor = _command(subs, "top", commands.top, "watch the cluster in the terminal, and act on it", _TOP)
    _connect_words(monitor)

    cancel = _command(subs, "cancel", commands.cancel, "end a session")
    cancel.add_argument(
        "session", type=argument_types.session, metavar="SESSION", help="its id, as `zrt status` shows it"
    )
    _connect_words(cancel)

    plan = _command(subs, "plan", commands.plan, "show which stage gets which blocks, and what memory they take", _PLAN)
    _cluster_words(plan)
    plan.add_argument("--json", action="store_true", help="one JSON object on stdout")

    check = _command(subs, "check", commands.check, "say what a model is, and all that keeps it from being run", _CHECK)
    check.add_argument("model", metavar="MODEL", help="a demo name, a folder, or a hub id")
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")

    check.add_argument(
        "--tp", type=argument_types.positive, metavar="N", default=1, help="start N ranks, too, and let them sum"
    )
    check.add_argument(
        "--device", type=argument_types.device, default="cpu", help="of the first rank: cpu, cuda:0, … (default: cpu)"
    )

    fetch = _command(subs, "fetch", commands.fetch, "download a model into the cache, and print its folder")
    fetch.add_argument("model", metavar="MODEL", help="a demo name, a folder, or a hub id")

    drain = _command(subs, "drain", commands.drain, "take a block server out of service with nothing lost", _DRAIN)
    drain.add_argument("name", metavar="NAME", help="the block server's, as `zrt status` shows it")
    drain.add_argument(
        "--timeout",
        type=argument_types.seconds,
        default=30.0,
        metavar="S",
        help="seconds sessions may go on there (default: 30)",
    )
    _connect_words(drain)

    undrain = _command(subs, "undrain", commands.undrain, "let a drained block server serve again")
    undrain.add_argument("name", metavar="NAME", help="the block server's")
    _connect_words(undrain)

    down = _command(subs, "down", commands.down, "bring the cluster down, and return when it is gone", _DOWN)
    down.add_argument(
        "--timeout",
        type=argument_types.seconds,
        default=5.0,
        metavar="S",
        help="seconds sessions may go on (default: 5)",
    )
    _connect_words(down)

    worker = _command(subs, "worker", actor_commands.worker, "lend this machine's memory to a cluster", _WORKER)
    actor_commands.worker_words(worker)

    actor = subs.add_parser("actor", help="start one process by hand", description="Start one process by hand.")
    _actor_words(actor.add_subparsers(required=True, metavar="KIND"))
    return top


_UP = """Start a coordinator and the block servers of a cluster file, restart what dies, and stay until Ctrl-C or `zrt down`.
With --prompt or --token-ids: ask once, stream the answer, and bring the cluster down."""
_GENERATE = """Stream one answer to stdout; how fast it came goes to stderr. Ctrl-C ends it, at the cluster too."""
_CHAT = """Talk, turn by turn: each line is a turn, and all turns are context of the next. Ctrl-C ends the answer that is being given;
Ctrl-C or Ctrl-D instead of a line leaves."""

_DRAIN = """Take a block server out of service with nothing lost: its sessions move to another replica of its stage. Where there is none they
may finish; what still runs when the time is up is parked, and goes on when a replica, a restart or `zrt undrain` comes. The block server
keeps its weights. Ctrl-C ends this command, but not the drain: `zrt undrain` does."""
_DOWN = """Bring the cluster down, and return when it is gone. No session is taken any more; those that are there may finish until the time
is up. A second `zrt down` does not wait for them."""
_TOP = """Watch the cluster in the terminal: processes, sessions, drains, events and throughput, live; cancel, drain, restart and chat by keys.
`?` lists them. It reconnects by itself when the coordinator is lost."""
_WORKER = """Hold layers of the model for a cluster: one with a stage that takes help (backend = "layers"), or whose file has a [[worker]] of this
name. Nothing is needed on disk: what it holds is sent to it, and kept in the cache. It stays when the cluster goes, and serves the next one there."""
_PLAN = """Show which stage of a cluster file gets which blocks, and what memory that takes of what there is. Nothing is started; of the
model, no weights are needed. Exit status 1 when memory is short, or a GPU is not there."""
_CHECK = """Say what a model is, and list all that keeps it from being run: from its config, its tokenizer and the headers of its weights.
Nothing is started, but for ranks with --tp. Exit status 1 when it cannot be run. `zrt up` checks the weights first, too."""


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, description: str = ""
) -> argparse.ArgumentParser:
    text = description or f"{about[0].upper()}{about[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=text)
    command.set_defaults(run=run)
    return command


class _Version(argparse.Action):
    """--version; reading it takes a while, so it is read when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from zrt.runtime.version import release

        print(f"zrt {release()}")
        parser.exit()


def _actor_words(kinds: Any) -> None:
    server = _command(
        kinds,
        "block-server",
        actor_commands.block_server,
        "a block server: blank until the coordinator gives it blocks",
    )
    actor_commands.block_server_words(server)
    rank = _command(
        kinds,
        "tp-rank",
        actor_commands.tp_rank,
        "a tensor-parallel rank: its leader, or anybody's JSON, tells it what to do",
    )
    actor_commands.rank_words(rank)
    coordinator = _command(kinds, "coordinator", actor_commands.coordinator, "the coordinator of a cluster file")
    _cluster_words(coordinator)
    _listen_words(coordinator)
    actor_commands.coordinator_words(coordinator)


def _cluster_words(command: argparse.ArgumentParser) -> None:
    command.add_argument("conf", metavar="CONF", nargs="?", type=Path, help="a cluster file (default: conf/local.toml)")
    command.add_argument("--model", metavar="REF", help="a demo name, a folder, or a hub id; in place of the file's")
    command.add_argument(
        "--stages", type=argument_types.positive, metavar="N", help="N planned stages in place of the file's"
    )
    command.add_argument(
        "--tp", type=argument_types.positive, metavar="N", help="N tensor-parallel ranks in every stage"
    )


def _listen_words(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--listen",
        metavar="ENDPOINT",
        help="where clients reach the cluster, such as tcp://127.0.0.1:0; in place of the file's",
    )
    actor_commands.open_words(command)


def _connect_words(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--connect", metavar="ENDPOINT", help="the cluster's (default: $ZRT_ENDPOINT, or the last one started here)"
    )


def _sampling_words(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-tokens", type=argument_types.positive, metavar="N", help="default: until the context is full"
    )
    command.add_argument(
        "--temperature", type=argument_types.temperature, metavar="T", help="0 is greedy (default: the model's)"
    )
    command.add_argument("--top-k", type=argument_types.count, metavar="K", help="0 is off (default: the model's)")
    command.add_argument("--top-p", type=argument_types.share, metavar="P", help="1 is off (default: the model's)")
    command.add_argument("--min-p", type=argument_types.floor, metavar="P", help="0 is off (default: the model's)")
    command.add_argument(
        "--repetition-penalty",
        type=argument_types.factor,
        metavar="R",
        help="divides the logits of all tokens so far; 0.01 to 1000, 1 is off (default: the model's)",
    )
    command.add_argument(
        "--presence-penalty",
        type=argument_types.penalty,
        metavar="A",
        help="off the logits of the answer's tokens; -2 to 2",
    )
    command.add_argument(
        "--frequency-penalty",
        type=argument_types.penalty,
        metavar="A",
        help="the same, each time a token occurs; -2 to 2",
    )
    command.add_argument(
        "--logit-bias",
        type=argument_types.bias,
        action="append",
        default=[],
        metavar="ID:BIAS",
        help="onto the logit of a token, -100 to 100; repeatable",
    )
    command.add_argument("--min-tokens", type=argument_types.count, metavar="N", help="nothing ends the answer before")
    command.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on after the model's own end of an answer"
    )
    command.add_argument("--seed", type=argument_types.count, metavar="N", help="default: drawn, and reported")
    command.add_argument(
        "--stop",
        type=argument_types.stop,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    command.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=argument_types.token,
        action="append",
        default=[],
        metavar="ID",
        help="end at this token; repeatable",
    )


def _generate_words(command: argparse.ArgumentParser) -> None:
    _sampling_words(command)
    command.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    command.add_argument("--token-ids", type=argument_types.ids, metavar="1,2,3", help="token ids in place of a text")
    command.add_argument(
        "--logprobs",
        type=argument_types.likeliest,
        metavar="N",
        help="with --json: each token's log-probability, and the N likeliest tokens'; 0 to 20",
    )
    command.add_argument(
        "--n",
        type=argument_types.answers,
        metavar="N",
        help="this many answers, the next one with the next seed; 1 to 16",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the stream")


if __name__ == "__main__":
    sys.exit(main())
