"""An actor's options reach its process whole: from the words of a person, and from a parent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zrt.actors.main import KINDS
from zrt.actors.node.command_lines import CommandLines, Line
from zrt.actors.options import (
    ActorOptions,
    BlockServerOptions,
    ClusterOptions,
    CoordinatorOptions,
    LayerWorkerOptions,
    RankOptions,
    command_line,
    from_words,
)
from zrt.runtime.cli.cluster_arguments import options_from
from zrt.runtime.cli.main import command_line as zrt_command_line
from zrt.runtime.cluster.file_loader import MOST_BYTES, parse
from zrt.runtime.cluster.file_schema import Spares
from zrt.runtime.errors import ZrtError
from zrt.runtime.process.python_command import python_command

MEMBER: dict[str, Any] = {
    "name": "front",
    "device": "cuda:1",
    "threads": 3,
    "listen": "tcp://10.0.0.2:0",
    "join": "tcp://10.0.0.1:7411",
    "memory": 1 << 30,
    "advertise": "tcp://box",
    "insecure": True,
    "cluster_id": "c1",
}
CLUSTER: dict[str, Any] = {
    "conf": "some.toml",
    "model": "tiny \udcff",
    "stages": 3,
    "tp": 2,
    "listen": "tcp://0.0.0.0:1",
    "advertise": "tcp://box",
    "insecure": True,
}
WHOLE: list[ActorOptions] = [
    CoordinatorOptions(**CLUSTER, port_wait=2.5, cluster_id="c1"),
    BlockServerOptions(**MEMBER, shared_threads=2),
    LayerWorkerOptions(**MEMBER),
    RankOptions(name="front.rank1", device="cuda:1", threads=3, listen="tcp://127.0.0.1:5", rank=1, world=2),
]
"""Options of each kind, none of which has its default."""

each_kind = pytest.mark.parametrize("options", WHOLE, ids=lambda options: options.kind)


def by_hand(options: ActorOptions) -> list[str]:
    """The words that say these options to `zrt`."""
    words = ["worker"] if options.kind == "layer-worker" else ["actor", options.kind]
    for name, value in msgspec.structs.asdict(options).items():
        if name == "conf":
            words.append(str(value))
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


@each_kind
def test_no_option_of_these_is_its_default(options: ActorOptions) -> None:
    """Else what follows would not notice one that is forgotten on the way."""
    assert type(options) is KINDS[options.kind].options
    for field in msgspec.structs.fields(options):
        assert getattr(options, field.name) != field.default


def test_every_kind_is_here() -> None:
    assert [options.kind for options in WHOLE] == list(KINDS)


@each_kind
def test_a_child_gets_every_option_and_shows_kind_and_name(options: ActorOptions) -> None:
    words = command_line(options)
    module = python_command("zrt.actors.main")
    assert words == [*module, options.kind, "--name", options.name, words[-1]]
    assert from_words(words[len(module) :], type(options)) == options


@each_kind
def test_what_is_left_at_its_default_reaches_a_child_too(options: ActorOptions) -> None:
    needed = {field.name: getattr(options, field.name) for field in msgspec.structs.fields(options) if field.required}
    least = type(options)(**needed)
    assert from_words(command_line(least)[len(python_command("")) :], type(options)) == least


@each_kind
def test_every_option_has_a_word_of_the_command_line(options: ActorOptions) -> None:
    assert options_from(zrt_command_line().parse_args(by_hand(options)), type(options)) == options


@each_kind
def test_the_command_line_and_the_options_have_the_same_defaults(options: ActorOptions) -> None:
    needed = {field.name: getattr(options, field.name) for field in msgspec.structs.fields(options) if field.required}
    least = type(options)(**needed)
    words = [word for name, value in needed.items() for word in (f"--{name}", str(value))]
    command = by_hand(options)[: 1 if options.kind == "layer-worker" else 2]
    assert options_from(zrt_command_line().parse_args([*command, *words]), type(options)) == least


@pytest.mark.parametrize(
    "words", [[], ["cook"], ["tp-rank", "--name", "x", '{"rank":1,"world":2}'], ["tp-rank", "--rank", "1"]]
)
def test_another_command_line_is_refused(words: list[str]) -> None:
    done = subprocess.run(python_command("zrt.actors.main", *words), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m zrt.actors.main KIND")
    assert "Traceback" not in done.stderr


CONF = """
[model]
ref = "m"
[[stage]]
threads = 2
memory = "1GiB"
device = "cuda:0"
backend = "layers"
[[worker]]
name = "attic"
memory = "2GiB"
threads = 1
"""


def test_zrt_up_hands_on_what_the_cluster_file_and_its_own_words_say() -> None:
    conf = parse(CONF, "test")
    given = ClusterOptions(**CLUSTER)
    lines = CommandLines(conf, given, "c1", detached=False)

    def options(line: Line) -> ActorOptions:
        words = line.argv[len(python_command("zrt.actors.main")) :]
        return from_words(words, KINDS[words[0]].options)

    assert options(lines.coordinator()) == CoordinatorOptions(**CLUSTER, cluster_id="c1")
    again = CLUSTER | {"listen": "tcp://127.0.0.1:7412"}
    reached = lines.coordinator_again("tcp://127.0.0.1:7412")
    assert options(reached) == CoordinatorOptions(**again, cluster_id="c1", port_wait=5.0)
    at = "tcp://127.0.0.1:7412"
    common: dict[str, Any] = {"join": at, "cluster_id": "c1"}
    assert options(lines.server("stage0", at, conf.stages[0])) == BlockServerOptions(
        name="stage0", device="cuda:0", threads=2, shared_threads=2, memory=1 << 30, **common
    )
    assert options(lines.worker(at, conf.workers[0])) == LayerWorkerOptions(
        name="attic", threads=1, memory=2 << 30, **common
    )
    spare = options(lines.server("spare0", at, Spares()))
    assert isinstance(spare, BlockServerOptions)
    assert (spare.name, spare.join, spare.memory) == ("spare0", at, 0)


@pytest.mark.parametrize(
    "more", ["", "# \u00fc\u4e16\r\n", "#" * (MOST_BYTES - len(CONF))], ids=["short", "words", "long"]
)
def test_every_coordinator_is_handed_the_cluster_file_that_was_read(more: str, tmp_path: Path) -> None:
    """Whatever it holds, and as large as it may be."""
    file = tmp_path / "my.toml"
    file.write_bytes((more + CONF).encode())
    options = ClusterOptions(conf=str(file))
    conf = options.read()
    lines = CommandLines(conf, options, "c1", detached=False)
    file.unlink()
    show = "import json; from zrt.runtime.cluster import file_loader as f; print(json.dumps([f.handed_over(), f.handed_over()]))"
    for line in (lines.coordinator(), lines.coordinator_again("tcp://127.0.0.1:7412")):
        child = subprocess.run([sys.executable, "-c", show], env=os.environ | line.environment, capture_output=True)
        text, left = json.loads(child.stdout)
        assert (options.read(text), left) == (conf, None)


def test_a_mistake_in_what_was_handed_over_names_the_file() -> None:
    with pytest.raises(ZrtError, match="not TOML") as error:
        ClusterOptions(conf="/no/such.toml").read("model =")
    assert (error.value.kind, error.value.where) == ("bad_config", "/no/such.toml")


def test_a_cluster_file_that_is_too_large_to_be_handed_over_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("#" + "\u00fc" * (MOST_BYTES // 2) + CONF)
    with pytest.raises(ZrtError, match="at most 90 KiB") as error:
        ClusterOptions(conf=str(file)).read()
    assert (error.value.kind, error.value.where) == ("bad_config", str(file))
