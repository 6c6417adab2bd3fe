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
    """Where clients and joining actors reach the coordinator. Port 0 lets the system pick one."""

    name: Name = "local"
    listen: str = "tcp://127.0.0.1:7411"
    insecure: bool = False
    """Listen beyond this machine although nothing is encrypted and anybody may talk."""
    advertise: str | None = None
    """What others reach the coordinator by, where that is not what it listens on; a port it leaves
    out is that of `listen`."""


class Model(msgspec.Struct, frozen=True):
    """What is served: a demo name, a folder or a hub id; `context` is the longest session in
    tokens."""

    ref: Annotated[str, msgspec.Meta(min_length=1)]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    context: AtLeastOne = 4096
    weights: Literal["files", "random"] = "files"


class LendSettings(msgspec.Struct, frozen=True):
    """Blocks of a stage that a layer worker holds."""

    worker: Name
    blocks: Blocks


class Worker(msgspec.Struct, frozen=True):
    """A layer worker: a process of `zrt up`, or with `join` one that is started elsewhere by `zrt
    worker --name NAME`."""

    name: Name
    join: bool = False
    device: str = "cpu"
    threads: AtLeastOne | None = None
    memory: int | None = None
    """The most it may take, in bytes; None means what there is, less a reserve."""


class Stage(msgspec.Struct, frozen=True):
    """One stage of the pipeline. Blocks are planned where not pinned; `threads` None means every
    core.

    `memory` is the most each replica may take, in bytes: weights, KV and the process itself. None
    means what there is.
    """

    blocks: Blocks | None = None
    replicas: AtLeastOne = 1
    device: str = "cpu"
    threads: AtLeastOne | None = None
    memory: int | None = None
    tp: AtLeastOne = 1
    """Ranks that each block is split over, each a process of its own: on CUDA devices from `device`
    on."""
    lend: tuple[LendSettings, ...] = ()
    backend: Literal["local", "layers"] = "local"
    """With `layers`, workers that nothing is pinned to take blocks of it, as many as their memory
    and speed say."""
    gpu_memory: Share = GPU_MEMORY
    """The part of a CUDA device's memory that weights and KV may take; the rest is for a turn's
    own."""


class Spares(msgspec.Struct, frozen=True):
    """`count` blank block servers that take over any range of blocks that is lost; the rest as in
    Stage."""

    count: AtLeastZero = 0
    device: str = "cpu"
    threads: AtLeastOne | None = None
    memory: int | None = None


class Kv(msgspec.Struct, frozen=True):
    """The KV pool of each block server, in bytes."""

    bytes: int = 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """`chunk` in tokens (see Conf.chunk), `sessions` at once, `queue` of sessions that wait,
    `restarts` of an actor; the rest seconds."""

    chunk: AtLeastOne | None = None
    sessions: AtLeastOne = 64
    queue: AtLeastZero = 256
    idle_s: Seconds = 600.0
    lease_s: Seconds = 10.0
    restarts: AtLeastZero = 5


class Metrics(msgspec.Struct, frozen=True):
    """Where the coordinator answers GET /metrics and /healthz over HTTP; nowhere when empty. Port 0
    lets the system pick one."""

    listen: str = ""


class Log(msgspec.Struct, frozen=True):
    """What processes log, from which level on: lines for people, or a JSON object a line. See
    logs.py."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"


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
