"""The options of each kind of actor process, and the command line that starts a child with them.

`zrt actor KIND` and `zrt worker` fill the options from their own command lines; `zrt up` and the
leader of a tensor-parallel group fill them directly. Options hold no secrets: everybody on a
machine may read a command line.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from zrt.runtime.process.python_command import python_command

if TYPE_CHECKING:
    from typing import Self

    from zrt.runtime.cluster.file_schema import Conf

LOOPBACK: Final = "tcp://127.0.0.1:0"
"""Any free port, for this machine only."""


class ClusterOptions(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The choice of a cluster file (None: the packaged conf/local.toml), and what replaces its
    settings."""

    conf: str | None = None
    model: str | None = None
    stages: int | None = None
    tp: int | None = None
    listen: str | None = None
    advertise: str | None = None
    insecure: bool = False

    def read(self, text: str | None = None) -> "Conf":
        """Return the checked cluster file with the replacements made; `text` is what was read of
        the file before, None to read it. ZrtError bad_config."""
        from zrt.runtime.cluster import file_loader  # only the coordinator reads one

        # what the file may lack, or say otherwise, since these options say it
        given: dict[str, Any] = {"model": {"ref": self.model}} if self.model else {}
        given |= {"cluster": {"insecure": True}} if self.insecure else {}
        given |= {"stage": [{}]} if self.stages else {}
        return file_loader.override(
            file_loader.load(None if self.conf is None else Path(self.conf), given, text),
            model=self.model,
            stages=self.stages,
            tp=self.tp,
            listen=self.listen,
            advertise=self.advertise,
            insecure=self.insecure,
        )

    def elsewhere(self, conf: "Conf") -> "Self":
        """Return the options for a process in another folder: with absolute paths, that of the
        model too, which the cluster file may name by a relative one. `conf` is what `read`
        returned."""
        from zrt.runtime.models.fetch.resolve import local_folder  # only whoever has read a cluster file needs it

        folder = local_folder(conf.model.ref)
        return replace(
            self,
            conf=None if self.conf is None else os.path.abspath(self.conf),
            model=self.model if folder is None else os.path.abspath(folder),
        )


class CoordinatorOptions(ClusterOptions, frozen=True, kw_only=True):
    """The options of a coordinator. `cluster_id`: the id by which members know the cluster, empty
    for a new one. `port_wait`: the seconds to wait for the port while it is taken."""

    kind: ClassVar[str] = "coordinator"
    name: ClassVar[str] = "coordinator"

    port_wait: float = 0.0
    cluster_id: str = ""


class ComputeOptions(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The options that all processes that compute have in common. `name`: None for one made of the
    process id; `threads`: None for one per core."""

    kind: ClassVar[str]

    name: str | None = None
    device: str = "cpu"
    threads: int | None = None
    listen: str = LOOPBACK

    @property
    def num_threads(self) -> int:
        """The number of CPU threads to compute with."""
        return self.threads or len(os.sched_getaffinity(0))


class MemberOptions(ComputeOptions, frozen=True, kw_only=True):
    """The options of a process that joins the coordinator at `join`. `memory`: the most bytes the
    process may take, 0 for what there is. `cluster_id`: the id of the cluster it belongs to, empty
    for that of the first it joins. `insecure`: `listen` may be an interface that other machines
    reach."""

    join: str
    memory: int = 0
    advertise: str | None = None
    insecure: bool = False
    cluster_id: str = ""


class BlockServerOptions(MemberOptions, frozen=True, kw_only=True):
    """The options of a block server. `shared_threads`: CPU threads while other stages of this
    machine compute as well, None for as many as alone."""

    kind: ClassVar[str] = "block-server"

    shared_threads: int | None = None


class LayerWorkerOptions(MemberOptions, frozen=True, kw_only=True):
    """The options of a layer worker."""

    kind: ClassVar[str] = "layer-worker"


class RankOptions(ComputeOptions, frozen=True, kw_only=True):
    """The options of rank `rank`, from 1 on, of a tensor-parallel group of `world` ranks."""

    kind: ClassVar[str] = "tp-rank"

    rank: int
    world: int


ActorOptions = CoordinatorOptions | BlockServerOptions | LayerWorkerOptions | RankOptions


def command_line(options: ActorOptions) -> list[str]:
    """Return the command line that starts a child with these options, by this very Python. Its
    words show the actor's kind and name; its last word holds all options as JSON."""
    return python_command("zrt.actors.main", *_words(options))


def from_words(words: Sequence[str], kind: type[ActorOptions]) -> ActorOptions:
    """Return the options that a command line of this kind holds; `words` leave out what runs it.
    ValueError: `command_line` makes no such words."""
    options = msgspec.convert(json.loads(words[-1]), type=kind)
    if list(words) != _words(options):
        raise ValueError("KIND and NAME are not those of OPTIONS")
    return options


def _words(options: ActorOptions) -> list[str]:
    # msgspec's own JSON has no place for the bytes that a path may hold and UTF-8 does not.
    said = json.dumps(msgspec.to_builtins(options), separators=(",", ":"))
    name = ["--name", options.name] if options.name else []
    return [options.kind, *name, said]
