"""The devices of this machine, and the memory of each: the machine's memory for the CPU, a GPU's
own for a GPU."""

from contextlib import suppress

import torch

from zrt.runtime.errors import ZrtError
from zrt.runtime.host_memory import available_memory, total_memory


def check_device(device: torch.device | str) -> None:
    """Raise ZrtError unsupported if there is no such device."""
    place = torch.device(device)
    if place.type != "cpu" and (not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count()):
        raise ZrtError("unsupported", f"there is no device {device} here: {torch.cuda.device_count()} CUDA devices")


def device_memory(device: torch.device | str) -> tuple[int, int]:
    """Return a device's bytes of memory that are free now, and its bytes in all. ZrtError
    unsupported: there is no such device."""
    place = torch.device(device)
    if place.type == "cpu":
        return available_memory(), total_memory()
    check_device(place)
    free, total = torch.cuda.mem_get_info(place)
    return free, total


def device_lives(device: torch.device) -> bool:
    """Return whether a device still executes what it is told: after some errors a GPU does nothing
    more for this process, and reports an error at every call."""
    if device.type == "cpu":
        return True
    for ask in (lambda: torch.cuda.current_stream(device).query(), lambda: torch.cuda.synchronize(device)):
        with suppress(RuntimeError):
            ask()  # the second call waits, so only if the first fails: the device may wait for others
            return True
    return False


def out_of_memory(error: BaseException) -> ZrtError | None:
    """Return the ZrtError insufficient_memory or insufficient_vram that an exception of any kind
    stands for; None if the exception is not about memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return ZrtError("insufficient_vram", str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        said = str(error).rpartition("DefaultCPUAllocator: ")[2]
        return ZrtError("insufficient_memory", said or "there is no memory left")
    return None
