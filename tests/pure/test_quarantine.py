"""Which sessions may run after stages were lost with them, and which one is named for it."""

import pytest

from zrt.actors.coordinator.sessions.quarantine import LOSSES, TRIED, Quarantine

A, B, C = 1, 2, 3


def told(story: str) -> list[bool]:
    """What each word of a story says: `lost`, `runs`, `leaves` or `token`, of a session."""
    suspects, said = Quarantine(), []
    for word in story.split(","):
        what, session = word.split()
        ask = {"lost": suspects.lost, "runs": suspects.may_run, "leaves": suspects.leave, "token": suspects.clear}[what]
        said.append(ask({"A": A, "B": B, "C": C}[session]))
    return said


YES, NO = True, False
STORIES = {
    "one that loses its stage each time is named": ("lost A, lost A, lost A", [NO, NO, YES]),
    "a token clears it": ("lost A, lost A, token A, lost A, lost A, lost A", [NO, NO, NO, NO, NO, YES]),
    "a loss alone keeps nobody from running": ("lost A, lost B, runs A, runs B, runs C", [NO, NO, YES, YES, YES]),
    "after two, one at a time": (
        "lost A, lost B, lost A, lost B, runs A, runs B, runs C, runs A",
        [NO, NO, NO, NO, YES, NO, YES, YES],
    ),
    "the next is tried when a token clears the first": (
        "lost A, lost B, lost A, lost B, runs A, token A, runs B, lost B",
        [NO, NO, NO, NO, YES, YES, YES, YES],
    ),
    "the next is tried when the first is named and has ended": (
        "lost A, lost B, lost A, lost B, runs A, lost A, runs B, token A, runs B, token B",
        [NO, NO, NO, NO, YES, YES, NO, YES, YES, YES],
    ),
    "one that does not run keeps nobody waiting": (
        "lost A, lost B, lost A, lost B, runs A, leaves A, runs B, runs A, leaves A",
        [NO, NO, NO, NO, YES, YES, YES, NO, NO],
    ),
    "a token of another changes nothing": ("lost A, lost A, runs A, token C, runs A", [NO, NO, YES, NO, YES]),
}


@pytest.mark.parametrize("story", STORIES)
def test_suspects(story: str) -> None:
    words, said = STORIES[story]
    assert told(words) == said


def test_nothing_is_kept_of_those_that_are_cleared() -> None:
    suspects = Quarantine()
    assert not suspects
    suspects.lost(A)
    assert suspects
    suspects.clear(A)
    assert not suspects


@pytest.mark.parametrize("others", range(4))
def test_whoever_shares_its_turns_goes_on_and_it_is_named_after_so_many(others: int) -> None:
    """All that may run do so together, in a turn that is lost if the guilty one is in it."""
    suspects, waiting, lost = Quarantine(), [A, *range(10, 10 + others)], 0
    for _ in range(20):
        turn = [session for session in waiting if suspects.may_run(session)]
        if A not in turn:
            for session in turn:
                suspects.clear(session)
                waiting.remove(session)
            continue
        lost += 1
        for session in [session for session in turn if suspects.lost(session)]:
            waiting.remove(session)
        if A not in waiting:
            break
    assert lost == LOSSES > TRIED
    assert waiting == list(range(10, 10 + others))  # none of them was named
