"""A cluster file (conf/*.toml) as Structs, which file_loader.py reads: a table each, with its
settings and their defaults."""

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
    """It. ValueError: it names none."""
    if not re.fullmatch(r"cpu|cuda:\d{1,4}", text, re.ASCII):
        raise ValueError(f"{text!r} is no device; valid: cpu, cuda:0, cuda:1 and so on")
    return text


CHUNK: Final = 512
CHUNK_ON_GPU: Final = 2048


class ClusterSettings(msgspec.Struct, frozen=True):
    """The cluster's name, and where clients and joining processes reach the coordinator."""

    name: Name = "local"
    """What commands and the monitor call the cluster."""
    listen: str = "tcp://127.0.0.1:7411"
    """Where clients and joining processes reach the coordinator. Port 0 lets the system pick
    one."""
    insecure: bool = False
    """Listen beyond this machine although nothing is encrypted and anybody may talk."""
    advertise: str | None = None
    """What others reach the coordinator by, where that is not what it listens on: needed where it
    listens on every interface (`tcp://0.0.0.0:7411`). A port it leaves out is that of `listen`."""


class Model(msgspec.Struct, frozen=True):
    """The model that the cluster serves."""

    ref: Annotated[str, msgspec.Meta(min_length=1)]
    """A demo name, a folder with config.json and safetensors, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What weights are held in, and what is computed in."""
    context: AtLeastOne = 4096
    """Tokens of the longest session; the model's own limit, where that is less."""
    weights: Literal["files", "random"] = "files"
    """Where weights come from: the model's files, or drawn at random from config.json alone."""


class LendSettings(msgspec.Struct, frozen=True):
    """Blocks of the stage above it that a layer worker holds."""

    worker: Name
    """The `name` of a [[worker]]. A worker serves one stage."""
    blocks: Blocks
    """Any of the stage's blocks, the first and the last as well; both ends are included."""


class Worker(msgspec.Struct, frozen=True):
    """A layer worker: a process of `zrt up`, or with `join` one that is started elsewhere by `zrt
    worker --name NAME`."""

    name: Name
    """The name that [[stage.lend]] and `zrt worker --name` use."""
    join: bool = False
    """Whether it is started elsewhere; else `zrt up` starts it itself."""
    device: str = "cpu"
    """Where it computes."""
    threads: AtLeastOne | None = None
    """CPU threads for its products; left out, one for each core."""
    memory: int | None = None
    """The most it may take, in bytes; left out, what there is, less a reserve."""


class Stage(msgspec.Struct, frozen=True):
    """One stage of the pipeline, in pipeline order; at least one is needed."""

    blocks: Blocks | None = None
    """The blocks it holds, both ends included; left out, blocks are planned by their bytes."""
    replicas: AtLeastOne = 1
    """Block servers that hold this stage; a session goes where the fewest are, and stays."""
    device: str = "cpu"
    """Where each replica computes; with `tp`, the first of that many devices."""
    threads: AtLeastOne | None = None
    """CPU threads for products, at most; left out, all cores while one stage computes at a time,
    else its share of them."""
    memory: int | None = None
    """The most each replica may take, in bytes: weights, KV and the process itself. Planned stages
    share the blocks by it; left out of all of them, evenly."""
    tp: AtLeastOne = 1
    """Ranks that each block is split over, each a process of its own: on CUDA devices from `device`
    on."""
    lend: tuple[LendSettings, ...] = ()
    """The [[stage.lend]] tables below it: blocks that layer workers hold."""
    backend: Literal["local", "layers"] = "local"
    """With `layers`, workers that nothing is pinned to take blocks of it, as many as their memory
    and speed say."""
    gpu_memory: Share = GPU_MEMORY
    """The part of a CUDA device's memory that weights and KV may take; the rest is for a turn's
    own."""


class Spares(msgspec.Struct, frozen=True):
    """Blank block servers that take over any range of blocks that is lost."""

    count: AtLeastZero = 0
    """How many there are."""
    device: str = "cpu"
    """Where each computes."""
    threads: AtLeastOne | None = None
    """CPU threads for products, at most; left out, as for a stage."""
    memory: int | None = None
    """The most each may take, in bytes; left out, what there is."""


class Kv(msgspec.Struct, frozen=True):
    """The KV memory of block servers."""

    bytes: int = 1 << 30
    """KV memory of each block server; its ranks, and its layer workers, share it."""


class Limits(msgspec.Struct, frozen=True):
    """How much is taken on at once, and how long things may wait."""

    chunk: AtLeastOne | None = None
    """Tokens of a prompt run at once; left out, 512, and 2048 where all stages are on GPUs."""
    sessions: AtLeastOne = 64
    """Sessions that generate at once; more wait in the queue."""
    queue: AtLeastZero = 256
    """Sessions that wait; more are refused with `overloaded`."""
    idle_s: Seconds = 600.0
    """Seconds after which a session that comes to nothing ends."""
    lease_s: Seconds = 10.0
    """Seconds that a session waits for a client that is gone or does not read."""
    restarts: AtLeastZero = 5
    """Restarts of one process in five minutes; one that dies more often is not started again."""


class Metrics(msgspec.Struct, frozen=True):
    """The coordinator's HTTP port for Prometheus and health checks."""

    listen: str = ""
    """Where GET /metrics and /healthz are answered; nowhere unless it is set. Port 0 lets the
    system pick one."""


class Log(msgspec.Struct, frozen=True):
    """What processes log."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The level from which on lines are written: `info` has sessions, routes and deaths, `debug`
    each turn."""
    format: Literal["text", "json"] = "text"
    """Lines for people, or a JSON object a line, with actor, session, step and times."""


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
    """What errors call the file."""

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are run at once: by default what keeps a CPU, or GPUs, at
        work."""
        if self.limits.chunk is not None:
            return self.limits.chunk
        return CHUNK if any(stage.device == "cpu" for stage in self.stages) else CHUNK_ON_GPU
