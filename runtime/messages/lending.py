"""What a block server that lends blocks says of its layer workers, in its beats and while it loads."""

from typing import Literal

from msgspec import Struct

from zrt.runtime.messages.header import U64

WorkerState = Literal["reserve", "asked", "pushing", "loading", "ready", "lost"]


class WorkerLoad(Struct):
    """What a master knows of one layer worker.

    `state` is `reserve` (it has none of the stage's layers), `asked` (for what it holds of them), `pushing`, `loading`, `ready` or `lost`;
    `layers` reads "1-3,5". Of the `total_bytes` of its layers' files it has `held_bytes`; `pushed_bytes` were sent to this incarnation in
    all, `push_bytes` for the layers that it has or gets now, at a pace of `push_bytes_s`.
    Of its device's `total_mb` MiB of memory `free_mb` were free when it was asked. Microseconds: `latency_us` a question and its answer,
    `layer_us` one token through one layer, as it measured, `hop_us` a turn's hop there and back with what it computes, `overhead_us`
    without that (medians of the last), of `hops` in all.
    """

    name: str
    state: WorkerState
    layers: str = ""
    device: str = ""
    held_bytes: U64 = 0
    total_bytes: U64 = 0
    pushed_bytes: U64 = 0
    push_bytes_s: U64 = 0
    free_mb: U64 = 0
    total_mb: U64 = 0
    latency_us: U64 = 0
    layer_us: U64 = 0
    hop_us: U64 = 0
    hops: U64 = 0
    overhead_us: U64 = 0
    push_bytes: U64 = 0


class LendLoad(Struct):
    """A stage that lends blocks: those it runs itself (`own`, "0,4-7"), and its workers. `waits_for` says in words what keeps it from being
    loaded, empty if nothing does; `rebuilds` counts how often its layers were given out anew."""

    own: str = ""
    waits_for: str = ""
    rebuilds: U64 = 0
    workers: list[WorkerLoad] = []
