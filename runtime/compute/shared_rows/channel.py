"""The channel through which one process leaves rows for another of its machine, in memory that both
map, written and read by their devices.

The writer's device copies rows to a place of the memory and then writes the flag beside it; the
reader's device waits for that flag before it copies them. So a stage can begin a step, and hand it
on, before the previous stage has computed it: no host stands between two devices. A place is free
again once the reader's host says so. If no place is free, or the rows are too many, the rows travel
as bytes.

Each flag is a word of 32 bits, the number of the place's turn. When a writer dies, its reader marks
the memory broken and itself writes the flags that devices wait for: the rows then read are void.
What is computed from void rows is void, and devices tell each other so with the rows, before any
host can know: so no result of void rows is kept, however many stages further on.

A device that several processes share goes round among those that have work for it, in slices of 2
ms (NVIDIA H200): work that arrives during another process's slice takes the device away from that
process at the end, for 0.4 ms, even if the work only begins to wait. Work queued behind a wait that
is already there does not. So a reader whose device has nothing to do has it wait at once for the
rows that come next (`Expecting`), before they are announced.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zrt.runtime.compute.shared_rows.ring import LAST, PAGE, Device, RowRing, made, mapped
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver

log = logging.getLogger(__name__)

PLACES: Final = 4
"""Places of an outlet: one that is read, one that is written, and as many again for steps that
wait."""
MOST_PLACES: Final = 8
MOST_BYTES: Final = 1 << 31
_TURNS: Final = 1 << 32


class Outlet:
    """The memory that this process writes for one other process, with places of `place_bytes`
    bytes. `prepare` and the methods after it are called by the executor alone."""

    def __init__(self, place_bytes: int, device: Device, places: int = PLACES) -> None:
        self._place_bytes = -(-place_bytes // PAGE) * PAGE
        self._places = places
        self._device = device
        self._memory: RowRing | None = None
        self._fd = self._inode = -1
        self._turns = [0] * places
        self._last = 0
        self._number = 0

    def prepare(self) -> None:
        """Make the memory now, which takes tens of milliseconds, and try it. ZrtError unsupported:
        the device cannot do this."""
        (self._memory or self._make()).probe()

    def put(self, rows: Tensor, void: Tensor | None = None) -> HandedOver | None:
        """Have the device copy rows to a free place; they are void if any of `void`, int32 on the
        device, is not 0 (see `Inlet.copy`). None: no place is free, the rows do not fit a place, or
        there is no memory."""
        size = rows.numel() * rows.element_size()
        if size > self._place_bytes:
            return None
        try:
            memory = self._memory or self._make()
            memory.open()
        except (ZrtError, OSError) as error:
            log.warning("rows travel as bytes: %s", error)
            self._place_bytes = 0
            return None
        for step in range(1, self._places + 1):
            place = (self._last + step) % self._places
            if int(memory.words[memory.taken(place)]) == self._turns[place]:
                break
        else:
            return None
        self._last = place
        turn = (self._turns[place] + 1) % _TURNS
        left = memory.rows(place, 0, tuple(rows.shape), rows.dtype)
        self._device.leave(rows, left, void, memory.flag(memory.void(place)))
        memory.write(memory.written(place), turn)
        self._turns[place] = turn
        self._number = (self._number + 1) % _TURNS
        memory.write(LAST, self._number)
        return HandedOver(
            os.getpid(), self._fd, self._inode, self._places, self._place_bytes, place, turn, number=self._number
        )

    def take_back(self, handed: HandedOver) -> None:
        """Free the place of rows that no reader is told of."""
        if self._memory is not None and handed.inode == self._inode:
            self._memory.words[self._memory.taken(handed.place)] = handed.turn

    def close(self) -> None:
        """Release the memory, once the device is done with it; a process that has it open keeps
        it."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._fd)
            self._memory = None

    def _make(self) -> RowRing:
        self._fd, self._memory = made(self._places, self._place_bytes, self._device)
        self._inode = os.fstat(self._fd).st_ino
        return self._memory


class Inlet:
    """The memory of another process's outlet. `pid_fd` is readable once that process is gone."""

    def __init__(self, handed: HandedOver, device: Device) -> None:
        """Open the memory. ZrtError stage_lost: the process is gone; bad_request: it has no such
        memory."""
        self.places, self.place_bytes = handed.places, handed.place_bytes
        size = PAGE + self.places * self.place_bytes
        if not 1 <= self.places <= MOST_PLACES or size > MOST_BYTES or self.place_bytes % PAGE:
            raise ZrtError("bad_request", f"handed: {self.places} places of {self.place_bytes} bytes are not possible")
        try:
            self.pid_fd = os.pidfd_open(handed.pid)
        except (OSError, OverflowError) as error:
            raise ZrtError("stage_lost", f"the process {handed.pid} that hands rows over is gone") from error
        try:
            self._memory = mapped(handed, size, device)
        except BaseException:
            os.close(self.pid_fd)
            raise
        self._device = device
        self._waited = [0] * self.places
        self._expected: int | None = None

    @property
    def broken(self) -> bool:
        return self._memory.broken

    def rows(
        self, handed: HandedOver, steps: Sequence[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
    ) -> "list[HandedRows]":
        """Return for each step (its first row, the number of its rows) the rows, each of this
        shape. Their place is given back when all are dropped.

        ZrtError bad_request: the rows do not lie in that place.
        """
        end = max((first + count for first, count in steps), default=0)
        if handed.place >= self.places or end * dtype.itemsize * int(np.prod(shape, dtype=np.int64)) > self.place_bytes:
            raise ZrtError("bad_request", f"handed: no {end} rows in place {handed.place}")
        turn = _PlaceUse(self, handed.place, handed.turn, handed.number)
        return [HandedRows(turn, first, (count, *shape), dtype) for first, count in steps]

    @property
    def waits(self) -> bool:
        """Whether a device of this process waits for rows that are not written yet."""
        return not all(map(self._has, range(self.places), self._waited))

    def release(self) -> None:
        """Mark rows that are not written yet as void: the writer is gone. From any thread."""
        memory = self._memory
        memory.break_()
        for place, turn in enumerate(self._waited):
            if not self._has(place, turn):
                memory.words[memory.written(place)] = turn
        self.go_on()

    def _has(self, place: int, turn: int) -> bool:
        return (int(self._memory.words[self._memory.written(place)]) - turn) % _TURNS < _TURNS // 2

    def close(self) -> None:
        """Release the memory, once the device is done with it, in the executor."""
        self.go_on()
        self._memory.close()

    def expect(self, number: int) -> None:
        """Have the device wait for the rows of that number, or until `go_on`; work given to it from
        now on runs after the wait."""
        self._expected = number % _TURNS
        if not self.broken and not self._memory.closed:  # otherwise the word would never be written
            self._memory.wait(LAST, self._expected)

    def go_on(self) -> None:
        """End the device's wait for expected rows. From any thread."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._memory.words[LAST] = expected

    def is_void(self, place: int) -> bool:
        """Return whether the rows of this place are void: to be asked once the device has read
        them."""
        return self.broken or bool(self._memory.words[self._memory.void(place)])

    def copy(self, place: int, turn: int, number: int, first: int, to: Tensor, void: Tensor) -> None:
        """Have the device copy rows to `to` once they are written, and set `void`, int32 [1] on the
        device, to non-zero if they are void."""
        if number != self._expected or self._has(place, turn):
            self.go_on()
        self._expected = None  # the writer of expected rows writes the awaited word once the rows are there
        self._waited[place] = turn
        if self.broken:  # otherwise the device would wait for a flag for ever
            raise ZrtError("stage_lost", "the process that hands rows over is gone")
        self._memory.wait(self._memory.written(place), turn)
        left = self._memory.rows(place, first, tuple(to.shape), to.dtype)
        self._device.take(left, to, self._memory.broken_flag, self._memory.flag(self._memory.void(place)), void)

    def took(self, place: int, turn: int) -> None:
        self._memory.words[self._memory.taken(place)] = turn


class _PlaceUse:
    """One use of a place: the place is free again when none of its rows is held any more."""

    __slots__ = ("_place", "_turn", "inlet", "number")

    def __init__(self, inlet: Inlet, place: int, turn: int, number: int) -> None:
        self.inlet, self.number = inlet, number
        self._place, self._turn = place, turn

    @property
    def broken(self) -> bool:
        return self.inlet.broken

    @property
    def void(self) -> bool:
        return self.inlet.is_void(self._place)

    def copy(self, first: int, to: Tensor, void: Tensor) -> None:
        self.inlet.copy(self._place, self._turn, self.number, first, to, void)

    def __del__(self) -> None:
        self.inlet.took(self._place, self._turn)


class HandedRows:
    """Rows [n, ...] that lie in another process's memory, or will: a forward has its device copy
    them. Cut like a tensor.

    To be held until the device has read them: after that the place is given back.
    """

    __slots__ = ("_first", "_turn", "dtype", "shape")

    def __init__(self, turn: _PlaceUse, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._turn = turn
        self._first = first
        self.shape = shape
        self.dtype = dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "HandedRows":
        start, stop, _ = part.indices(len(self))
        return HandedRows(self._turn, self._first + start, (max(0, stop - start), *self.shape[1:]), self.dtype)

    def with_next(self, rows: "Tensor | HandedRows") -> "HandedRows | None":
        """Return these rows and the given ones as one, if the given ones lie right behind these;
        else None."""
        if not isinstance(rows, HandedRows) or (rows._turn, rows._first) != (self._turn, self._first + len(self)):
            return None
        return HandedRows(self._turn, self._first, (len(self) + len(rows), *self.shape[1:]), self.dtype)

    @property
    def broken(self) -> bool:
        """Whether the rows will never be there."""
        return self._turn.broken

    @property
    def void(self) -> bool:
        """Whether the rows that were read are void: to be asked once the device has read them."""
        return self._turn.void

    def copy_to(self, to: Tensor, void: Tensor) -> None:
        """Have the device copy the rows (see `Inlet.copy`). ZrtError stage_lost: the rows will
        never be there."""
        self._turn.copy(self._first, to, void)

    @property
    def inlet(self) -> Inlet:
        """The inlet that the rows come from."""
        return self._turn.inlet

    @property
    def number(self) -> int:
        return self._turn.number


class Joined:
    """The rows of a batch, part after part, some of them handed over."""

    def __init__(self, parts: "list[Tensor | HandedRows]") -> None:
        self.parts = parts
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]


Rows: TypeAlias = Tensor | HandedRows | Joined
"""The input of a forward."""


class Expecting:
    """The inlet whose next rows a device waits for, if any. `meet` must be called before every
    other use of the device; where it was not, `stop` ends the wait."""

    def __init__(self) -> None:
        self._inlet: Inlet | None = None

    def __bool__(self) -> bool:
        return self._inlet is not None

    def after(self, rows: Rows) -> None:
        """Have the device wait for the rows that come after the given ones, once it has been given
        all work with these."""
        if isinstance(rows, HandedRows):
            self._inlet = rows.inlet
            self._inlet.expect(rows.number + 1)

    def meet(self, rows: Rows) -> None:
        """Note that the given rows come next, and end the wait if they are not the expected
        ones."""
        if self._inlet is not None and isinstance(rows, HandedRows) and rows.inlet is self._inlet:
            self._inlet = None
        else:
            self.stop()

    def stop(self) -> None:
        """End the device's wait. From any thread."""
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.go_on()


def joined(parts: Sequence[Tensor | HandedRows]) -> Rows:
    """Return the parts as one input, in as few parts as possible: each costs the device copies of
    its own."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    fewer = [parts[0]]
    for part in parts[1:]:
        last = fewer[-1]
        both = last.with_next(part) if isinstance(last, HandedRows) else None
        if both is None:
            fewer.append(part)
        else:
            fewer[-1] = both
    return fewer[0] if len(fewer) == 1 else Joined(fewer)


def parts_of(rows: Rows) -> Iterator[tuple[int, "Tensor | HandedRows"]]:
    """Yield the first row of each part, and the part."""
    start = 0
    for part in rows.parts if isinstance(rows, Joined) else (rows,):
        yield start, part
        start += len(part)
