"""What a client that takes nothing, or was away, hears once it listens again; and for how long it
may."""

import pytest

from zrt.actors.coordinator.sessions import delivery as delivery_module
from zrt.actors.coordinator.sessions.delivery import Delivery, Leases
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Error, Piece, Progress, Resume
from zrt.runtime.messages.sampling import TokenLogprobs
from zrt.runtime.wire.clients import decode_event


class Outlet:
    """Where an actor's replies go: nowhere while `full`."""

    def __init__(self) -> None:
        self.full = True
        self.taken: list[object] = []
        self.incarnation = 1

    def reply_bare(self, bare: Bare, frame: bytes) -> bool:
        if not self.full:
            self.taken.append(decode_event(frame))
        return not self.full


def piece(index: int, token: int, logprobs: bool) -> Piece:
    said = [TokenLogprobs(token, -float(token))] if logprobs else None
    return Piece(id="1", choice=2, index=index, text=f"t{token}", token_ids=[token], logprobs=said)


def heard(logprobs: bool) -> list[object]:
    outlet = Outlet()
    delivery = Delivery(outlet, Bare(b"peer", b"", False), "1", 0.0, choice=2)  # type: ignore[arg-type]
    for event in (piece(0, 5, logprobs), Progress(id="1", phase="decoding"), piece(1, 6, logprobs)):
        delivery.send(event, 1.0)
    assert delivery.stalled
    outlet.full = False
    assert delivery.retry()
    return outlet.taken


def test_pieces_melt_into_one_with_their_logprobs() -> None:
    said = [TokenLogprobs(5, -5.0), TokenLogprobs(6, -6.0)]
    assert heard(logprobs=True) == [Piece(id="1", choice=2, index=0, text="t5t6", token_ids=[5, 6], logprobs=said)]


def test_pieces_without_logprobs_stay_without() -> None:
    assert heard(logprobs=False) == [Piece(id="1", choice=2, index=0, text="t5t6", token_ids=[5, 6])]


def delivery(outlet: Outlet, *tokens: int, logprobs: bool = False) -> Delivery:
    made = Delivery(outlet, Bare(b"peer", b"", False), "1", 0.0, choice=2)  # type: ignore[arg-type]
    for index, token in enumerate(tokens):
        made.send(piece(index, token, logprobs), 1.0)
    return made


@pytest.mark.parametrize(("index", "chars"), [(0, 0), (1, 2), (2, 3), (3, 6)])
def test_whoever_comes_back_hears_what_follows_from_where_it_stopped(index: int, chars: int) -> None:
    outlet = Outlet()
    outlet.full = False
    said = delivery(outlet, 5, 6, 7, logprobs=True)
    outlet.taken.clear()
    request = Resume(id="9", session=1, resume=said.resume, index=index, chars=chars)
    said.move(Bare(b"other", b"", False), request, 2.0)
    said.send(piece(3, 8, True), 3.0)
    left = Error(id="1", kind="cancelled", message="the session goes on over another connection")
    ids = [5, 6, 7][index:]
    logprobs = [TokenLogprobs(token, -float(token)) for token in ids]
    rest = (
        [Piece(id="9", choice=2, index=index, text="t5t6t7"[chars:], token_ids=ids, logprobs=logprobs)] if ids else []
    )
    (next_,) = [piece(3, 8, True)]
    next_.id = "9"
    assert outlet.taken == [left, *rest, next_]


@pytest.mark.parametrize(("index", "chars"), [(4, 0), (0, 7)])
def test_nobody_has_heard_more_than_was_said(index: int, chars: int) -> None:
    said = delivery(Outlet(), 5, 6, 7)
    with pytest.raises(ZrtError) as raised:
        said.move(Bare(b"p", b"", False), Resume(id="9", session=1, resume="", index=index, chars=chars), 2.0)
    assert raised.value.kind == "bad_request"
    assert said.request == "1"


def test_an_answer_is_kept_until_its_lease_is_over() -> None:
    kept = Leases(10.0)
    first, second = delivery(Outlet(), 5), delivery(Outlet(), 6)
    kept.keep(1, first, 0.0)
    kept.keep(2, second, 1.0)
    kept.keep(1, first, 5.0)  # its client came back
    kept.tend(11.0)
    assert (kept.find(1), kept.find(2), len(kept)) == (first, None, 1)
    kept.tend(15.0)
    assert len(kept) == 0


@pytest.mark.parametrize(("bound", "most"), [("SESSIONS", 3), ("SIZE", 6)])
def test_what_is_kept_is_bounded(bound: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, bound, most)
    kept = Leases(10.0)
    for session in range(10):
        kept.keep(session, delivery(Outlet(), 5, logprobs=True), 0.0)
    assert [session for session in range(10) if kept.find(session)] == [7, 8, 9]
