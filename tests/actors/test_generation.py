"""What a generation says of its own time."""

import pytest

from zrt.actors.coordinator.sessions.delivery import Delivery
from zrt.actors.coordinator.sessions.generation import Generation
from zrt.actors.coordinator.sessions.session import Session
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Bare
from zrt.runtime.messages.header import HopTime
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.messages.sessions import SampledToken
from zrt.runtime.page_keys import PageKeys
from zrt.runtime.text.stop_strings import StopMatcher


def _generation() -> Generation:
    session = Session(7, frozenset(), Sampling(), StopMatcher([]))
    session.begin([1, 2], 20, None)
    delivery = Delivery(Actor("coordinator"), Bare(b"peer", b"", False), "1", 0.0)
    return Generation(session, delivery, PageKeys("model", 16), 0.0, 0.0)


def _take(generation: Generation, at: float) -> None:
    """A token whose only stage took 3 ms."""
    index = len(generation.session.tokens)
    generation.session.push(index, 5)
    generation.take(SampledToken(7, generation.session.epoch, index, 5, [HopTime(1000, 1900, 100, 0)]), at)


def test_between_the_stages_is_what_no_stage_accounts_for() -> None:
    generation = _generation()
    for at in (1.0, 1.005, 1.010):
        _take(generation, at)
    assert generation.info(0.0, 1.010, 16).network_ms == pytest.approx(2.0)


def test_an_interruption_is_nobodys_network() -> None:
    generation = _generation()
    _take(generation, 1.0)
    _take(generation, 1.005)
    generation.session.begin_epoch()  # a stage was lost
    _take(generation, 9.0)
    _take(generation, 9.005)
    info = generation.info(0.0, 9.005, 16)
    assert info.network_ms * 3 == pytest.approx(4.0, abs=0.01)
    assert max(info.gaps_ms) == pytest.approx(7995)
