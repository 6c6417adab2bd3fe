"""Pages of KV memory: owned, cached, found again by name, evicted."""

from array import array
from collections.abc import Hashable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zrt.runtime.compute.kv.page_pool import Freed, Opening, PagePool, session_name
from zrt.runtime.errors import ZrtError
from zrt.runtime.page_keys import PageKeys

PAGE = 4


def pool(total: int = 20, sessions: int = 3) -> PagePool:
    return PagePool(total, PAGE, 64, sessions)


def run(made: PagePool, key: str, upto: int) -> None:
    made.reserve(key, upto)
    made.commit(key, upto)


def books(made: PagePool) -> tuple[int, int, int]:
    stats = made.stats()
    return stats.used, stats.cached, stats.free


def test_a_closed_session_leaves_its_full_named_pages_behind() -> None:
    made = pool()
    made.open("a", [1, 2])
    run(made, "a", 11)
    assert books(made) == (3, 0, 17)
    made.close("a", [1, 2])
    assert books(made) == (0, 2, 18)
    assert made.freed() == [Freed(0, 8)]


def test_without_names_nothing_is_kept() -> None:
    made = pool()
    made.open("a")
    run(made, "a", 11)
    made.close("a")
    assert books(made) == (0, 0, 20)
    assert made.freed() == [Freed(0, 0)]


def test_an_equal_history_takes_the_cached_row_over() -> None:
    made = pool()
    made.open("a", [1, 2])
    run(made, "a", 8)
    made.close("a")
    assert made.open("b", [1, 2, 3]) == Opening(0, 0, 8)
    assert made.have("b") == 8
    assert books(made) == (2, 0, 18)


def test_a_common_beginning_is_copied_and_the_rest_stays_cached() -> None:
    made = pool()
    made.open("a", [1, 2, 3])
    run(made, "a", 12)
    made.close("a")
    assert made.open("b", [1, 2, 9]) == Opening(1, 0, 8)
    assert books(made) == (2, 3, 15)


def test_a_running_session_can_be_copied_from_as_far_as_it_has_come() -> None:
    made = pool()
    made.open("a", [1, 2, 3])
    run(made, "a", 9)
    assert made.open("b", [1, 2, 3]) == Opening(1, 0, 8)
    run(made, "a", 12)
    assert made.open("c", [1, 2, 3]) == Opening(2, 0, 12)


def test_going_back_hides_what_was_forgotten() -> None:
    made = pool()
    made.open("a", [1, 2, 3])
    run(made, "a", 12)
    made.rewind("a", 7)
    assert made.open("b", [1, 2, 3]) == Opening(1, 0, 4)


def test_cached_pages_make_room_the_least_recently_used_first() -> None:
    made = pool(total=6)
    for key, name in (("a", 1), ("b", 5)):
        made.open(key, [name, name + 1])
        run(made, key, 8)
        made.close(key)
    assert books(made) == (0, 4, 2)
    made.freed()
    made.open("c")
    made.reserve("c", 12)
    assert made.freed() == [Freed(0, 4)]
    assert books(made) == (3, 3, 0)
    made.reserve("c", 24)
    assert books(made) == (6, 0, 0)
    with pytest.raises(ZrtError, match="0 of 6 are free") as caught:
        made.reserve("c", 25)
    assert caught.value.kind == "kv_full"


def test_a_prefix_that_cannot_be_copied_for_want_of_pages_is_taken_over() -> None:
    made = pool(total=4)
    made.open("a", [1, 2, 3])
    run(made, "a", 12)
    made.close("a")
    assert made.open("b", [1, 2, 9]) == Opening(0, 0, 8)
    assert books(made) == (2, 0, 2)


def test_new_names_hide_pages_whose_names_changed() -> None:
    made = pool()
    made.open("a", [1, 2])
    run(made, "a", 8)
    made.rewind("a", 4)
    made.rename("a", [1, 7])
    run(made, "a", 8)
    made.close("a")
    assert made.open("b", [1, 2]).tokens == 4
    assert made.open("c", [1, 7]).tokens == 8


def test_a_session_too_many_is_refused() -> None:
    made = pool(sessions=1)
    made.open("a")
    with pytest.raises(ZrtError, match="1 session at most, and all are taken") as caught:
        made.open("b")
    assert caught.value.kind == "overloaded"


class Machine(RuleBasedStateMachine):
    """Any order of events: the books are right, and a page found by its name holds what the name
    says.

    `memory` stands for the slab: the tokens of each row, written by steps, copied by openings,
    wiped by what is given back.
    """

    @initialize(total=st.integers(4, 24), sessions=st.integers(1, 4))
    def begin(self, total: int, sessions: int) -> None:
        self.pool = PagePool(total, PAGE, 64, sessions)
        self.memory: list[list[int | None]] = [[None] * 200 for _ in range(self.pool.rows)]
        self.histories: dict[int, list[int]] = {}
        self.serial = 0

    def names(self, history: list[int]) -> list[int]:
        return PageKeys("m", PAGE).of(array("I", history))

    def wipe(self) -> None:
        for freed in self.pool.freed():
            self.memory[freed.row][freed.start :] = [None] * (200 - freed.start)

    @rule(history=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def open(self, history: list[int]) -> None:
        self.serial += 1
        try:
            opening = self.pool.open(self.serial, self.names(history))
        except ZrtError as error:
            assert error.kind == "overloaded"
            return
        self.wipe()
        n = opening.tokens
        self.memory[opening.row][:n] = self.memory[opening.source][:n]
        self.histories[self.serial] = history

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=30))
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        """Run the history, and as many new tokens."""
        key = data.draw(st.sampled_from(sorted(self.histories)))
        history = self.histories[key] + tokens
        have = self.pool.have(key)
        try:
            self.pool.reserve(key, len(history))
        except ZrtError as error:
            assert error.kind == "kv_full"
            assert self.pool.have(key) == have
            return
        self.wipe()
        self.memory[self.pool.row(key)][have : len(history)] = history[have:]
        self.pool.commit(key, len(history))
        self.histories[key] = history

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), n=st.integers(0, 60))
    def go_back(self, data: st.DataObject, n: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.histories)))
        self.pool.rewind(key, n)
        self.wipe()
        history = self.histories[key]
        self.histories[key] = history[: max(1, min(n, len(history)))]
        self.pool.rename(key, self.names(self.histories[key]))  # other tokens may follow, as after an open
        if len(self.histories[key]) < self.pool.have(key):
            raise AssertionError("more is held than there was")

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.histories)))
        self.pool.rename(key, self.names(self.histories[key]))

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), named=st.booleans())
    def close(self, data: st.DataObject, named: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.histories)))
        history = self.histories.pop(key)
        self.pool.close(key, self.names(history) if named else None)
        self.pool.close(key)
        self.wipe()

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        assert stats.free + stats.cached + stats.used == stats.total
        assert min(stats.free, stats.cached, stats.used) >= 0
        assert stats.used == sum(row.pages for row in self.pool._sessions.values())
        assert stats.cached == sum(row.pages for row in self.pool._cached.values())

    @invariant()
    def every_session_holds_its_history(self) -> None:
        for key, history in getattr(self, "histories", {}).items():
            have = self.pool.have(key)
            assert self.memory[self.pool.row(key)][:have] == history[:have]

    @invariant()
    def a_cached_page_is_evictable(self) -> None:
        if not hasattr(self, "pool"):
            return
        for row in self.pool._cached.values():
            assert row.pages == row.named > 0


TestMachine = Machine.TestCase


@pytest.mark.parametrize(("key", "shown"), [(255, "00000000000000ff"), (("peer", 1), "('peer', 1)")])
def test_a_session_is_named_as_commands_take_it(key: Hashable, shown: str) -> None:
    assert session_name(key) == shown
