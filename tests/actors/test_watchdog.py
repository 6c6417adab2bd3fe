"""Calls that block, in threads of their own."""

import gc
import threading
import weakref

import pytest
from support.peers import PATIENCE_S

from zrt.runtime.watchdog import beside


class Held:
    """Something that a call works with."""


def test_a_call_that_fails_lets_go_of_what_it_worked_with_once_its_error_is_let_go_of() -> None:
    """Without the garbage collector, which may come late."""
    left: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        left.append(weakref.ref(held))
        raise OSError("refused")

    gc.disable()
    try:
        with pytest.raises(OSError, match="refused") as raised:
            beside("fails", fail, lambda: None, 0.01)
        del raised
        until_ended("fails")
        assert left[0]() is None
    finally:
        gc.enable()


def test_a_call_that_is_given_up_ends_by_itself() -> None:
    go_on = threading.Event()

    def look() -> None:
        raise TimeoutError("it was given up")

    with pytest.raises(TimeoutError, match="given up"):
        beside("waits", lambda: go_on.wait(PATIENCE_S), look, 0.01)
    assert "waits" in names()
    go_on.set()
    until_ended("waits")


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def until_ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_S)
    assert name not in names()
