"""The other side of memory in which rows are handed over: a process that writes it, and a device
whose flags are the host's own."""

import ctypes
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from zrt.runtime.compute.shared_rows.channel import Outlet
from zrt.runtime.messages.header import HandedOver

WAIT_S = 20.0
WIDTH = 8


class HostDevice:
    """A device that does its work at once, like a stream that has nothing else to do."""

    def register(self, address: int, size: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def write(self, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def wait(self, address: int, value: int) -> None:
        word, deadline = ctypes.c_uint32.from_address(address), time.monotonic() + WAIT_S
        while (word.value - value) % 2**32 >= 2**31:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)

    def leave(self, rows: Tensor, place: Tensor, void: Tensor | None, said: Tensor) -> None:
        place.copy_(rows)
        said.fill_(void is not None and bool(void.any()))

    def take(self, place: Tensor, to: Tensor, broken: Tensor, said: Tensor, void: Tensor) -> None:
        to.copy_(place)
        void.copy_(broken | said)

    def sample(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int16)


class LateDevice(HostDevice):
    """A device that writes nothing before it is told to go on."""

    def __init__(self) -> None:
        self.late: list[tuple[int, int]] = []

    def write(self, address: int, value: int) -> None:
        self.late.append((address, value))

    def go_on(self) -> None:
        for address, value in self.late:
            super().write(address, value)
        self.late.clear()


class Writer:
    """A process with an outlet, which is told by lines what to do (see `main`)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, **what: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def put(self, rows: list[int], void: list[int] | None = None) -> HandedOver | None:
        """Have the process put rows [len, WIDTH], each filled with one of the numbers; return where
        they lie, None if they found no place."""
        said = self.do(put=rows, void=void)
        return None if said is None else HandedOver(*said)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    device = LateDevice()
    outlet = Outlet(4 * WIDTH * 4, device)
    for line in sys.stdin:
        what, said = json.loads(line), None
        if "put" in what:
            void = None if what["void"] is None else torch.tensor(what["void"], dtype=torch.int32)
            handed = outlet.put(torch.tensor(what["put"], dtype=torch.float32)[:, None].repeat(1, WIDTH), void)
            if handed is not None:
                said = [getattr(handed, name) for name in HandedOver.__struct_fields__]
        elif "go_on" in what:
            device.go_on()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
