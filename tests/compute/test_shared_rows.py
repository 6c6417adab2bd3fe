"""Rows handed over in memory that two processes map."""

import ctypes
import gc
import os
import select
import threading
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from support.handing import WAIT_S, WIDTH, HostDevice, Writer
from torch import Tensor

from zrt.runtime.compute.shared_rows.channel import (
    MOST_PLACES,
    PLACES,
    Expecting,
    HandedRows,
    Inlet,
    Joined,
    Outlet,
    joined,
    parts_of,
)
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import HandedOver


@pytest.fixture(scope="module")
def theirs() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.end()


@pytest.fixture
def writer() -> Iterator[Writer]:
    """One that a test may spoil or kill."""
    writer = Writer()
    yield writer
    writer.end()


def _put(writer: Writer, *rows: int, void: list[int] | None = None) -> HandedOver:
    handed = writer.put(list(rows), void)
    assert handed is not None
    return handed


def _rows(inlet: Inlet, handed: HandedOver, count: int, first: int = 0) -> HandedRows:
    return inlet.rows(handed, [(first, count)], (WIDTH,), torch.float32)[0]


def _read(rows: HandedRows, void: Tensor | None = None) -> list[float]:
    to = torch.empty(rows.shape)
    rows.copy_to(to, torch.empty(1, dtype=torch.int32) if void is None else void)
    assert torch.equal(to, to[:, :1].expand_as(to))
    return to[:, 0].tolist()


def test_rows_of_another_process_are_read_where_they_lie(theirs: Writer) -> None:
    handed = _put(theirs, 1, 2, 3, 4)
    theirs.do(go_on=True)
    inlet = Inlet(handed, HostDevice())
    rows = _rows(inlet, handed, 4)
    assert len(rows) == 4
    assert _read(rows) == [1, 2, 3, 4]
    assert _read(rows[1:3]) == [2, 3]
    assert _read(rows[1:][1:]) == [3, 4]
    assert _read(_rows(inlet, handed, 1, first=3)) == [4]
    again = _put(theirs, 5)
    theirs.do(go_on=True)
    assert _read(_rows(inlet, again, 1)) == [5]  # the same memory, another place
    assert not rows.broken


def test_rows_are_waited_for_until_their_writer_has_them(theirs: Writer) -> None:
    handed = _put(theirs, 7)
    inlet = Inlet(handed, HostDevice())
    seen: list[float] = []
    reader = threading.Thread(target=lambda: seen.extend(_read(_rows(inlet, handed, 1))))
    reader.start()
    assert not seen
    theirs.do(go_on=True)
    reader.join(WAIT_S)
    assert seen == [7]
    assert not inlet.waits


def test_a_place_is_free_again_when_nobody_holds_rows_of_it(theirs: Writer) -> None:
    puts = [_put(theirs, number) for number in range(PLACES)]
    inlet = Inlet(puts[0], HostDevice())
    held = [_rows(inlet, handed, 1) for handed in puts]
    assert theirs.put([9]) is None
    part = held[1][:1]
    del held[1]
    gc.collect()
    assert theirs.put([9]) is None  # a part is held still
    del part
    gc.collect()
    handed = _put(theirs, 9)
    theirs.do(go_on=True)
    assert _read(_rows(inlet, handed, 1)) == [9]


def test_the_steps_of_a_message_hold_its_place_together(theirs: Writer) -> None:
    handed = _put(theirs, 1, 2, 3)
    inlet = Inlet(handed, HostDevice())
    one, two, three = inlet.rows(handed, [(0, 1), (1, 1), (2, 1)], (WIDTH,), torch.float32)
    others = [_put(theirs, number) for number in range(PLACES - 1)]
    del one, two
    gc.collect()
    assert theirs.put([9]) is None
    theirs.do(go_on=True)
    assert _read(three) == [3]
    del three
    gc.collect()
    others.append(_put(theirs, 9))
    theirs.do(go_on=True)
    for handed in others:
        _drop(handed)


def test_rows_that_nobody_is_told_of_take_no_place() -> None:
    outlet = Outlet(64, HostDevice())
    for _ in range(3 * PLACES):
        handed = outlet.put(torch.ones(1, WIDTH))
        assert handed is not None
        outlet.take_back(handed)
    outlet.close()


def test_all_places_that_there_may_be_have_flags_of_their_own() -> None:
    outlet = Outlet(64, HostDevice(), MOST_PLACES)
    puts = [outlet.put(torch.full((1, WIDTH), float(number))) for number in range(MOST_PLACES)]
    assert outlet.put(torch.ones(1, WIDTH)) is None
    inlet = Inlet(puts[0], HostDevice())
    assert [_read(_rows(inlet, handed, 1)) for handed in puts] == [[number] for number in range(MOST_PLACES)]
    assert not inlet.waits
    outlet.close()


def test_too_many_rows_are_not_handed_over() -> None:
    outlet = Outlet(2 * WIDTH * 4, HostDevice())
    assert outlet.put(torch.ones(4096, WIDTH)) is None
    assert outlet.put(torch.ones(2, WIDTH)) is not None
    outlet.close()


class _Queue(HostDevice):
    """Remembers what it is told to wait for."""

    def __init__(self) -> None:
        self.waits: list[tuple[ctypes.c_uint32, int]] = []

    def wait(self, address: int, value: int) -> None:
        self.waits.append((ctypes.c_uint32.from_address(address), value))

    def goes_on(self) -> bool:
        """Whether all that it waited for has come."""
        return all((word.value - value) % 2**32 < 2**31 for word, value in self.waits)


def test_rows_are_waited_for_before_anybody_hears_of_them(theirs: Writer) -> None:
    handed = _put(theirs, 1)
    theirs.do(go_on=True)
    device, expecting = _Queue(), Expecting()
    inlet = Inlet(handed, device)
    rows = _rows(inlet, handed, 1)
    for number in range(2, 3 * PLACES):
        expecting.meet(rows)
        assert _read(rows) == [number - 1]
        assert device.goes_on()
        expecting.after(rows)
        assert bool(expecting)
        assert not device.goes_on()
        handed = _put(theirs, number)
        if number % 3 == 1:  # they are written before we hear of them
            theirs.do(go_on=True)
            assert device.goes_on()
        rows = _rows(inlet, handed, 1)
        expecting.meet(rows)
        assert not expecting
        rows.copy_to(torch.empty(rows.shape), torch.empty(1, dtype=torch.int32))
        assert device.goes_on() == (number % 3 == 1)
        theirs.do(go_on=True)
        assert device.goes_on()


@pytest.mark.parametrize("other", ["none", "bytes", "both", "another inlet", "later rows", "void rows", "close"])
def test_what_is_expected_holds_nothing_up(other: str, writer: Writer, theirs: Writer) -> None:
    first = _put(writer, 1)
    writer.do(go_on=True)
    device, expecting = _Queue(), Expecting()
    inlet = Inlet(first, device)
    rows = _rows(inlet, first, 1)
    _read(rows)
    expecting.after(rows)
    assert not device.goes_on()
    if other == "none":
        expecting.stop()
    elif other == "bytes":
        expecting.meet(torch.ones(1, WIDTH))
    elif other == "both":
        expecting.meet(Joined([torch.ones(1, WIDTH), rows]))
    elif other == "another inlet":
        theirs_ = _put(theirs, 3)
        theirs.do(go_on=True)
        expecting.meet(_rows(Inlet(theirs_, HostDevice()), theirs_, 1))
    elif other == "later rows":
        missed = _put(writer, 2)
        later = _put(writer, 3)
        _drop(missed)
        meant = _rows(inlet, later, 1)
        expecting.meet(meant)
        meant.copy_to(torch.empty(meant.shape), torch.empty(1, dtype=torch.int32))
        assert device.waits.pop()[1] == later.turn
    elif other == "void rows":
        writer.kill()
        inlet.release()
    else:
        inlet.close()
    assert device.goes_on()
    expecting.stop()
    inlet.expect(5)
    assert device.goes_on() == (other in ("void rows", "close"))


def test_when_the_writer_dies_what_it_had_not_written_is_void(writer: Writer) -> None:
    written = _put(writer, 1)
    writer.do(go_on=True)
    inlet = Inlet(written, HostDevice())
    before = _rows(inlet, written, 1)
    assert _read(before) == [1]
    promised = _put(writer, 2)
    rows, over = _rows(inlet, promised, 1), threading.Event()
    reader = threading.Thread(target=lambda: (_read(rows), over.set()))
    reader.start()
    poll = select.poll()
    poll.register(inlet.pid_fd, select.POLLIN)
    assert not poll.poll(0)
    writer.kill()
    assert poll.poll(WAIT_S * 1000)
    while not inlet.waits:  # the reader has come to its wait
        assert reader.is_alive()
    assert not over.is_set()
    inlet.release()
    assert over.wait(WAIT_S)
    assert rows.broken
    with pytest.raises(ZrtError) as refused:
        _read(rows)
    assert refused.value.kind == "stage_lost"
    os.close(inlet.pid_fd)


def test_what_comes_of_void_rows_is_void_however_many_processes_further_on(writer: Writer, theirs: Writer) -> None:
    """A dead process's rows reach us; what we make of them reaches another, and from there a
    third."""
    written = _put(writer, 1)
    writer.do(go_on=True)
    first = Inlet(written, HostDevice())
    void = torch.zeros(3, dtype=torch.int32)
    _read(_rows(first, written, 1), void[:1])
    assert not void.any()
    promised = _put(writer, 2)
    writer.kill()
    rows = _rows(first, promised, 1)
    reader = threading.Thread(target=lambda: _read(rows, void[:1]))
    reader.start()
    while not first.waits:
        assert reader.is_alive()
    first.release()
    reader.join(WAIT_S)
    assert rows.void
    for stage in (1, 2):
        handed = _put(theirs, 3, void=void.tolist())
        good = _put(theirs, 4, void=[0, 0])
        theirs.do(go_on=True)
        inlet = Inlet(handed, HostDevice())
        rows = _rows(inlet, handed, 1)
        void.zero_()
        assert _read(rows, void[stage : stage + 1]) == [3]
        assert (rows.void, rows.broken) == (True, False)
        assert void.any()
        beside = _rows(inlet, good, 1)
        _read(beside)
        assert not beside.void
    again = _put(theirs, 5)
    theirs.do(go_on=True)
    assert not _rows(inlet, again, 1).void


def test_memory_is_tried_before_it_is_offered() -> None:
    class Deaf(HostDevice):
        def write(self, address: int, value: int) -> None:
            pass

        def wait(self, address: int, value: int) -> None:
            pass

    with pytest.raises(ZrtError) as refused:
        Outlet(64, Deaf()).prepare()
    assert refused.value.kind == "unsupported"
    Outlet(64, HostDevice()).prepare()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"pid": 2**22 + 1}, "stage_lost"),
        ({"fd": 999}, "stage_lost"),
        ({"fd": 0}, "stage_lost"),  # a pipe
        ({"inode": 5}, "stage_lost"),
        ({"pid": 2**32 - 1}, "stage_lost"),
        ({"places": 0}, "bad_request"),
        ({"places": 2**31}, "bad_request"),
        ({"places": PLACES + 1}, "bad_request"),
        ({"places": MOST_PLACES + 1}, "bad_request"),
        ({"place_bytes": 2**40}, "bad_request"),
        ({"place_bytes": 4097}, "bad_request"),
        ({"place_bytes": 8192}, "bad_request"),
    ],
)
def test_memory_that_is_none_is_refused(wrong: dict[str, int], kind: str, theirs: Writer) -> None:
    handed = _put(theirs, 1)
    _drop(handed)
    with pytest.raises(ZrtError) as refused:
        Inlet(replace(handed, **wrong), HostDevice())
    assert refused.value.kind == kind


@pytest.mark.parametrize(("place", "first", "count"), [(PLACES, 0, 1), (0, 0, 129), (0, 128, 1), (0, 2**31, 1)])
def test_rows_outside_of_a_place_are_refused(place: int, first: int, count: int, theirs: Writer) -> None:
    handed = _put(theirs, 1)
    inlet = Inlet(handed, HostDevice())
    with pytest.raises(ZrtError) as refused:
        _rows(inlet, replace(handed, place=place), count, first)
    assert refused.value.kind == "bad_request"
    _rows(inlet, handed, 1)  # is dropped, and its place free


def test_memory_that_its_writer_may_shrink_is_refused(theirs: Writer) -> None:
    handed = _put(theirs, 1)
    _drop(handed)
    fd = os.memfd_create("zrt-handover", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096 + handed.places * handed.place_bytes)
    ours = replace(handed, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
    with pytest.raises(ZrtError, match="unsealed"):
        Inlet(ours, HostDevice())
    os.close(fd)


def test_a_batch_may_have_both_kinds_of_rows(theirs: Writer) -> None:
    handed = _put(theirs, 1, 2)
    rows = _rows(Inlet(handed, HostDevice()), handed, 2)
    joined = Joined([torch.zeros(3, WIDTH), rows, torch.ones(1, WIDTH)])
    assert (len(joined), joined.shape, joined.dtype) == (6, (6, WIDTH), torch.float32)
    parts = list(parts_of(joined))
    assert [start for start, _ in parts] == [0, 3, 5]
    assert [isinstance(part, Tensor) for _, part in parts] == [True, False, True]


def test_rows_that_lie_side_by_side_are_read_as_one(theirs: Writer) -> None:
    handed, other = _put(theirs, 1, 2, 3, 4), _put(theirs, 5)
    theirs.do(go_on=True)
    inlet = Inlet(handed, HostDevice())
    one, two, three, four = inlet.rows(handed, [(first, 1) for first in range(4)], (WIDTH,), torch.float32)
    whole = joined([one, two, three, four])
    assert isinstance(whole, HandedRows)
    assert _read(whole) == [1, 2, 3, 4]
    ones, more = torch.ones(1, WIDTH), _rows(inlet, other, 1)
    mixed = joined([two, one, two, ones, three, more, four])
    parts = [part for _, part in parts_of(mixed)]
    assert [start for start, _ in parts_of(mixed)] == [0, 1, 3, 4, 5, 6]
    assert [_read(part) for part in parts if isinstance(part, HandedRows)] == [[2], [1, 2], [3], [5], [4]]
    assert torch.equal(joined([ones, 2 * ones]), torch.tensor([[1.0], [2.0]]).expand(2, WIDTH))
    assert joined([ones]) is ones


def _drop(handed: HandedOver) -> None:
    """Free its place."""
    _rows(Inlet(handed, HostDevice()), handed, 1)
