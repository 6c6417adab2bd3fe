"""The memory that a cluster file asks of this machine's GPUs, against what they have."""

from collections.abc import Callable, Iterator

import msgspec

from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.memory import Needs
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size


class GpuNeeds(msgspec.Struct, frozen=True):
    """Bytes of weights and KV on one GPU, 0 where only spares are on it; `free_bytes` of
    `total_bytes` are free. Where there is no such GPU, `fault` says so and both are 0."""

    device: str
    needed_bytes: int
    free_bytes: int = 0
    total_bytes: int = 0
    fault: str = ""


def gpu_needs(conf: Conf, found: Needs, memory: Callable[[str], tuple[int, int]]) -> tuple[GpuNeeds, ...]:
    """Return the needs of each GPU that the processes of `zrt up` are on; `memory` returns the free
    and the total bytes of a device, and may raise ZrtError unsupported."""
    needed: dict[str, int] = {}
    for device, size in _held(conf, found):
        if device != "cpu":
            needed[device] = needed.get(device, 0) + size
    return tuple(_against(device, needed[device], memory) for device in sorted(needed))


def gpu_shortage(gpus: tuple[GpuNeeds, ...]) -> ZrtError | None:
    """Return `unsupported` where a GPU is not there, `insufficient_vram` where a GPU has too little
    free memory, with a line for each; None if all fits."""
    missing = [gpu.fault for gpu in gpus if gpu.fault]
    short = [
        f"{gpu.device}: {byte_size(gpu.needed_bytes)} are needed for weights and KV, and {byte_size(gpu.free_bytes)} of "
        f"{byte_size(gpu.total_bytes)} are free: lower [kv] bytes, or put the stages on more GPUs"
        for gpu in gpus
        if not gpu.fault and gpu.needed_bytes > gpu.free_bytes
    ]
    if not missing and not short:
        return None
    return ZrtError("unsupported" if missing else "insufficient_vram", "\n".join(missing + short))


def _against(device: str, needed: int, memory: Callable[[str], tuple[int, int]]) -> GpuNeeds:
    try:
        return GpuNeeds(device, needed, *memory(device))
    except ZrtError as error:
        return GpuNeeds(device, needed, fault=error.message)


def _held(conf: Conf, found: Needs) -> Iterator[tuple[str, int]]:
    """Yield devices, each with bytes of weights and KV on it."""
    for stage, planned in zip(conf.stages, found.stages, strict=True):
        own = planned.weight_bytes + planned.kv_bytes - planned.lendable_bytes
        for lent in planned.lent:
            if not lent.joins:
                yield lent.device, lent.weight_bytes + lent.kv_bytes
        for device in _ranks(stage.device, stage.tp):
            yield device, stage.replicas * own // stage.tp
    if conf.spares.count:
        yield conf.spares.device, 0
    for worker in conf.workers:
        if not worker.join:
            yield worker.device, 0


def _ranks(device: str, tp: int) -> list[str]:
    """Return the devices of a stage's ranks."""
    kind, _, first = device.partition(":")
    return [f"{kind}:{int(first) + rank}" if first else kind for rank in range(tp)]
