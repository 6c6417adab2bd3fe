"""Snapshots by difference: what is sent of a change, and that it makes the same snapshot again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import actor, cluster, group, happened, session

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Changes, Cluster
from zrt.runtime.messages.cluster import GAPS
from zrt.runtime.wire.clients import decode_event, encode_event
from zrt.runtime.wire.cluster_changes import Snapshots, between


def sent(old: Cluster, new: Cluster, serial: int = 1) -> Changes:
    """The difference as it arrives."""
    changes = between(old, new)
    changes.id, changes.serial = "1", serial
    event = decode_event(encode_event(changes))
    assert isinstance(event, Changes)
    return event


def test_what_did_not_change_is_not_sent() -> None:
    changes = sent(cluster(), cluster())
    assert (changes.cluster, changes.actors, changes.sessions, changes.happened) == ({}, {}, {}, [])


def test_of_what_changed_the_fields_are_sent() -> None:
    new = cluster(tokens=9)
    new.actors[1].busy_share = 0.5
    new.sessions[0].completion_tokens += 2
    new.sessions[0].gaps_ms = [1.0, 2.0, 4.0, 8.0, 9.0]
    changes = sent(cluster(), new)
    assert changes.cluster == {"tokens": 9}
    assert changes.actors == {"stage1": {"busy_share": 0.5}}
    assert changes.sessions == {0: {"completion_tokens": 12, "new_gaps_ms": [8.0, 9.0]}}


def test_what_is_gone_is_none_and_what_is_new_is_whole() -> None:
    old, new = cluster(), cluster()
    new.actors[0] = actor("another", 0)
    new.sessions[0] = session(7, state="queued")
    changes = sent(old, new)
    assert changes.actors["stage0"] is None
    assert changes.sessions[0] is None
    assert changes.sessions[7] is not None
    assert changes.sessions[7]["state"] == "queued"
    assert changes.actors["another"] == msgspec.to_builtins(actor("another", 0))


def test_unchanged_parts_stay_the_same_objects() -> None:
    first, second = cluster(), cluster()
    second.sessions[1].state = "waiting"
    seen = Snapshots()
    seen.take(first)
    made = seen.take(sent(first, second))
    assert made == second
    assert made.sessions[0] is first.sessions[0]


parts = st.fixed_dictionaries(
    {
        "numbers": st.lists(st.integers(0, 5), unique=True, max_size=4),
        "stages": st.lists(st.integers(0, 5), unique=True, max_size=4),
        "tokens": st.integers(0, 40),
        "state": st.sampled_from(["queued", "decoding"]),
        "drain_us": st.integers(0, 2),
        "up_ms": st.integers(0, 9),
    }
)


def made_of(parts: dict) -> Cluster:
    made = cluster(0, 0, up_ms=parts["up_ms"], tokens=parts["tokens"], happened=[happened(parts["up_ms"])])
    made.actors = [
        actor(f"s{stage}", stage, group=group(1, parts["drain_us"]) if parts["drain_us"] else None)
        for stage in sorted(parts["stages"])
    ]
    made.sessions = [session(number, parts["tokens"], state=parts["state"]) for number in sorted(parts["numbers"])]
    for one in made.sessions:
        one.gaps_ms = [float(gap) for gap in range(1, parts["tokens"])][-GAPS:]
    return made


@given(st.lists(parts, min_size=2, max_size=5))
def test_changes_make_the_same_snapshots_again(story: list[dict]) -> None:
    """But for the order of sessions that vanish and come back, which none does."""
    seen, last = Snapshots(), made_of(story[0])
    seen.take(last)
    for serial, each in enumerate(story[1:], 1):
        new = made_of(each)
        made = seen.take(sent(last, new, serial))
        assert made is not None
        made.sessions.sort(key=lambda one: one.session)
        assert made == msgspec.structs.replace(new, id=made.id)
        last = new


def test_after_a_gap_nothing_is_made_until_a_whole_one_comes() -> None:
    seen = Snapshots()
    assert seen.take(Changes(id="1", serial=1)) is None
    seen.take(cluster())
    assert seen.take(Changes(id="1", serial=1)) is not None
    assert seen.take(Changes(id="1", serial=3)) is None
    assert seen.take(Changes(id="1", serial=4)) is None
    assert seen.take(cluster(tokens=7)) is not None
    assert seen.take(Changes(id="1", serial=1)).tokens == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"cluster": {"tokens": "many"}},
        {"actors": {"stage0": {"kv": 5}}},
        {"actors": {"new": {"kind": "block_server"}}},
        {"sessions": {0: {"new_gaps_ms": 7}}},
        {"sessions": {0: {"new_gaps_ms": ["x"]}}},
        {"sessions": {9: {"state": "decoding"}}},
    ],
)
def test_changes_that_are_none_to_this_cluster_are_refused(wrong: dict) -> None:
    seen = Snapshots()
    seen.take(cluster())
    with pytest.raises(ZrtError) as raised:
        seen.take(Changes(id="1", serial=1, **wrong))
    assert raised.value.kind == "bad_request"
    assert seen.take(Changes(id="1", serial=1)) is None


def test_a_field_that_this_version_does_not_know_is_passed_over() -> None:
    seen = Snapshots()
    seen.take(cluster())
    made = seen.take(Changes(id="1", serial=1, cluster={"mood": "good"}, actors={"stage0": {"mood": "good"}}))
    assert made == cluster()
