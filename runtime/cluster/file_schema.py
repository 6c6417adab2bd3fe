"""A cluster file (conf/*.toml) as Structs, which file_loader.py reads: one Struct per table, with
its settings and their defaults."""

import re
from typing import Annotated, Final, Literal

import msgspec

from zrt.runtime.cluster.partition import Blocks
from zrt.runtime.messages.members import GPU_MEMORY

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Name = Annotated[str, msgspec.Meta(pattern=NAME)]


def device(text: str) -> str:
    """Return `text` if it names a device. ValueError: it names none."""
    if not re.fullmatch(r"cpu|cuda:\d{1,4}", text, re.ASCII):
        raise ValueError(f"{text!r} is no device; valid: cpu, cuda:0, cuda:1 and so on")
    return text


CHUNK: Final = 512
CHUNK_ON_GPU: Final = 2048


class ClusterSettings(msgspec.Struct, frozen=True):
    """Name of the cluster, and where clients and joining processes reach the coordinator."""

    name: Name = "local"
    """What commands and the monitor call the cluster."""
    listen: str = "tcp://127.0.0.1:7411"
    """Where clients and joining processes reach the coordinator. Port 0 lets the system pick
    one."""
    insecure: bool = False
    """Listen beyond this machine although nothing is encrypted and anybody may talk."""
    advertise: str | None = None
    """The address at which others reach the coordinator, where that is not the address it listens
    on: needed where it listens on every interface (`tcp://0.0.0.0:7411`). Without a port, it has
    the port of `listen`."""


class Model(msgspec.Struct, frozen=True):
    """The model that the cluster serves."""

    ref: Annotated[str, msgspec.Meta(min_length=1)]
    """The model: a demo name, a folder with config.json and safetensors, or a hub id. A relative
    folder is one of the folder where `zrt up` is started."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype in which weights are held and computed."""
    context: AtLeastOne = 4096
    """Tokens of the longest session; the model's own limit, where that is less."""
    weights: Literal["files", "random"] = "files"
    """Where weights come from: the model's files, or drawn at random from config.json alone."""


class LendSettings(msgspec.Struct, frozen=True):
    """Blocks of the stage above this table that a layer worker holds."""

    worker: Name
    """The `name` of a [[worker]]. A worker serves one stage."""
    blocks: Blocks
    """Any of the stage's blocks, including the first and the last; both ends are included."""


class Worker(msgspec.Struct, frozen=True):
    """A layer worker: a process of `zrt up`, or with `join` a process that is started elsewhere by
    `zrt worker --name NAME`."""

    name: Name
    """The name that [[stage.lend]] and `zrt worker --name` use."""
    join: bool = False
    """Whether the worker is started elsewhere; else `zrt up` starts it."""
    device: str = "cpu"
    """The device on which the worker computes."""
    threads: AtLeastOne | None = None
    """CPU threads for matrix products; left out, one for each core."""
    memory: int | None = None
    """The most memory that the worker may take, in bytes; left out, what there is, less a
    reserve."""


class Stage(msgspec.Struct, frozen=True):
    """One stage of the pipeline, in pipeline order; at least one is needed."""

    blocks: Blocks | None = None
    """The blocks that the stage holds, both ends included; left out, blocks are planned by their
    bytes."""
    replicas: AtLeastOne = 1
    """Block servers that hold this stage; a session goes to the replica with the fewest sessions,
    and stays."""
    device: str = "cpu"
    """The device on which each replica computes; with `tp`, the first of that many devices."""
    threads: AtLeastOne | None = None
    """The most CPU threads for matrix products; left out, all cores while one stage computes at a
    time, else the stage's share of them."""
    memory: int | None = None
    """The most memory that each replica may take, in bytes: weights, KV and the process itself.
    Planned stages share the blocks according to it; if all stages leave it out, evenly."""
    tp: AtLeastOne = 1
    """Ranks that each block is split over, each a process of its own: on CUDA devices from `device`
    on."""
    lend: tuple[LendSettings, ...] = ()
    """The [[stage.lend]] tables below the stage: blocks that layer workers hold."""
    backend: Literal["local", "layers"] = "local"
    """With `layers`, workers without pinned blocks take blocks of the stage, as many as their
    memory and speed allow."""
    gpu_memory: Share = GPU_MEMORY
    """The part of a CUDA device's memory that weights and KV may take; the rest is for the
    working memory of a turn."""


class Spares(msgspec.Struct, frozen=True):
    """Blank block servers that take over any range of blocks that is lost."""

    count: AtLeastZero = 0
    """Number of spares."""
    device: str = "cpu"
    """The device on which each spare computes."""
    threads: AtLeastOne | None = None
    """The most CPU threads for matrix products; left out, as for a stage."""
    memory: int | None = None
    """The most memory that each spare may take, in bytes; left out, what there is."""


class Kv(msgspec.Struct, frozen=True):
    """The KV memory of block servers."""

    bytes: int = 1 << 30
    """KV memory of each block server; its ranks, and its layer workers, share it."""


class Limits(msgspec.Struct, frozen=True):
    """Limits on how much is taken on at once, and how long things may wait."""

    chunk: AtLeastOne | None = None
    """Tokens of a prompt run at once; left out, 512, and 2048 where all stages are on GPUs."""
    sessions: AtLeastOne = 64
    """Sessions that generate at once; more wait in the queue."""
    queue: AtLeastZero = 256
    """Sessions that wait; more are refused with `overloaded`."""
    idle_s: Seconds = 600.0
    """Seconds after which a session that makes no progress ends."""
    lease_s: Seconds = 10.0
    """Seconds that a session waits for a client that is gone or does not read."""
    restarts: AtLeastZero = 5
    """Restarts of one process in five minutes; a process that dies more often is not started
    again."""


class Metrics(msgspec.Struct, frozen=True):
    """The coordinator's HTTP port for Prometheus and health checks."""

    listen: str = ""
    """Where GET /metrics and /healthz are answered; nowhere unless this is set. Port 0 lets the
    system pick one."""


class Log(msgspec.Struct, frozen=True):
    """Settings of the log that processes write."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level of the lines that are written: `info` has sessions, routes and deaths,
    `debug` each turn."""
    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object per line, with actor, session, step and times."""


class Conf(msgspec.Struct, frozen=True):
    """A cluster file. `stages` are in pipeline order and never empty."""

    model: Model
    stages: tuple[Stage, ...]
    cluster: ClusterSettings = ClusterSettings()
    spares: Spares = Spares()
    kv: Kv = Kv()
    limits: Limits = Limits()
    metrics: Metrics = Metrics()
    log: Log = Log()
    workers: tuple[Worker, ...] = ()
    where: str = ""
    """The file's name in error messages."""
    text: str = ""
    """The file as it was read, for the processes that are to have the same; empty where there was
    none."""

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are run at once: by default as many as keep a CPU, or GPUs, at
        work."""
        if self.limits.chunk is not None:
            return self.limits.chunk
        return CHUNK if any(stage.device == "cpu" for stage in self.stages) else CHUNK_ON_GPU
