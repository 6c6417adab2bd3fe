"""What the monitor's tables show of a snapshot, line by line."""

import pytest
from rich.cells import cell_len
from snapshots import actor, cluster, group, happened, session

from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.messages.control import RankLoad
from zrt.tui import rows
from zrt.tui.plot import plot
from zrt.tui.state import EVENTS, State
from zrt.tui.status import tree

TREE = """
test: tiny, 64 blocks, context 256, ready
actor                      state     KV pages    queue  busy   tok/s memory  p50
test: tiny
├ stage 0, blocks 0-0
│ └ stage0                 ready     ██░░░░  25%     0    0%     0.0
├ stage 1, blocks 1-1
│ ├ stage1.0               load 50%  ██░░░░  25%     0    0%     0.0
│ └ stage1.1               drained   ██░░░░  25%     0    0%     0.0     2G
│   · stage1.1 rank 0      ready                                         3M
│   · stage1.1 rank 1      ready                                         3M
└ others
  └ coordinator            ready
""".strip()


def test_the_cluster_is_a_tree_of_stages_replicas_and_ranks() -> None:
    actors = [
        actor("stage0", 0),
        actor("stage1.0", 1, state="loading", done_bytes=5, total_bytes=10),
        actor("stage1.1", 1, state="drained", rss_bytes=2**31, group=group(1, 1)),
        ActorInfo("coordinator", "coordinator", "ready"),
    ]
    seen = cluster(sessions=0)
    seen.actors = actors
    lines = [line.plain[:80].rstrip() for line in tree(seen)]
    assert "\n".join(lines) == TREE


@pytest.mark.parametrize(
    ("more", "style"),
    [
        ({}, "plain"),
        ({"silent_ms": 4000}, "dim"),
        ({"state": "draining"}, "warn"),
        ({"state": "failed"}, "bad"),
        ({"fault": "bad_model: no"}, "bad"),
    ],
)
def test_the_state_of_a_process_is_its_colour(more: dict[str, object], style: str) -> None:
    assert rows.TREE.row(rows.Node("x", actor("x", 0, **more))).style == style


@pytest.mark.parametrize(("state", "style"), [("ready", "plain"), ("loading", "warn"), ("lost", "bad")])
def test_a_rank_is_shown_with_its_state_memory_and_last_error(state: str, style: str) -> None:
    ranks = group(1, 1)
    ranks.ranks[1] = RankLoad(1, 7, errors=2, state=state, rss_bytes=5 << 20, error="rank_failed: it was killed")  # type: ignore[arg-type]
    leader = actor("x", 0, group=ranks)
    row = rows.TREE.row(rows.Node("x rank 1", leader, ranks.ranks[1]))
    assert row.style == style
    for cell in (state, "5M", "h:7", "2 errors, the last: rank_failed: it was killed"):
        assert cell in row.text


@pytest.mark.parametrize("name", ["a" * 64, "段落" * 20, "e\u0301" * 20, "tab\tline\nbell\a", "\x1b[31mred"])
def test_a_row_has_its_width_whatever_the_names_are(name: str) -> None:
    row = rows.TREE.row(rows.Node(name, actor(name, 0)))
    assert cell_len(row.text) == cell_len(rows.TREE.head)
    assert row.text.isprintable()


@pytest.mark.parametrize(("order", "first"), [("age", 0), ("tokens", 2), ("pace", 3), ("ttft", 1), ("state", 0)])
def test_sessions_are_sorted(order: str, first: int) -> None:
    all_ = [session(0), session(1, ttft_ms=99.0), session(2, tokens=50), session(3, state="waiting")]
    assert rows.sessions(all_, order, "")[0].session == first


@pytest.mark.parametrize(
    ("wanted", "found"), [("", 4), ("waiting", 1), ("client.0002", 1), ("stage1", 4), ("nothing", 0)]
)
def test_sessions_are_filtered_by_all_that_names_them(wanted: str, found: int) -> None:
    all_ = [session(0), session(1), session(2), session(3, state="waiting")]
    assert len(rows.sessions(all_, "age", wanted)) == found


def test_a_session_in_a_line() -> None:
    assert rows.SESSIONS.row(session(7)).text.rstrip() == (
        "0000000000000007 decoding       5     10    27.0       50 ▃▅█                  1     0 0007            stage0 → stage1"
    )


def test_a_drain_in_a_line() -> None:
    (drain,) = cluster().drains
    assert rows.DRAINS.row(drain).text.rstrip() == (
        "stage0             draining      2     1        0      0 1.5 of 9 s       client.1"
    )


def test_replies_are_means_of_the_steps_between_two_snapshots() -> None:
    state = State()
    for steps, drain in ((10, 1000), (10, 1000), (30, 5000)):
        seen = cluster(actors=1)
        seen.actors[0].group = group(steps, drain, errors=steps // 20)
        state.take(seen, 5.0)
    first, second = state.replies
    assert (first.rank, first.steps, first.fan_out_us, first.forward_us, first.drain_us, first.errors) == (
        0,
        20,
        20,
        300,
        0,
        0,
    )
    assert (second.rank, second.drain_us, second.errors) == (1, 200, 1)


def test_events_are_kept_once_each_and_bounded() -> None:
    state = State()
    state.take(cluster(happened=[happened(1), happened(2)]), 0.0)
    state.take(cluster(happened=[happened(2), happened(3, "death", "is gone")]), 0.0)
    assert [one.serial for one in state.happened] == [1, 2, 3]
    assert [one.serial for one in rows.events(state.happened, "death")] == [3]
    state.take(cluster(happened=[happened(serial) for serial in range(4, EVENTS + 50)]), 0.0)
    assert len(state.happened) == EVENTS


def test_a_new_coordinator_counts_anew() -> None:
    state = State()
    state.take(cluster(up_ms=90_000, tokens=500, happened=[happened(9)]), 0.0)
    state.take(cluster(up_ms=1_000, tokens=0, happened=[happened(1)]), 0.0)
    state.take(cluster(up_ms=3_000, tokens=60), 0.0)
    assert list(state.pace) == [(30.0, 2)]
    assert [one.serial for one in state.happened] == [1]


def test_a_plot_has_the_newest_at_the_right_and_the_largest_at_the_top() -> None:
    assert plot("x", [1.0, 2.0, 4.0], 5, 3) == ["x: 4.0, most 4.0", "    █", "  ▄██"]
