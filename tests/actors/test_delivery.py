"""What a client that takes nothing hears once it listens again."""

from zrt.actors.delivery import Delivery
from zrt.runtime.envelope import Bare
from zrt.runtime.messages.client import Piece, Progress
from zrt.runtime.messages.sampling import TokenLogprobs
from zrt.runtime.wire import decode_event


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
