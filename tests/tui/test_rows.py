"""What the monitor's tables show of a snapshot, line by line."""

import pytest
from rich.cells import cell_len
from support.snapshots import actor, cluster, group, happened, session, step, worker

from zrt.runtime.formatting import escaped
from zrt.runtime.messages.cluster import ActorInfo, HopInfo
from zrt.runtime.messages.stats import LendLoad, RankLoad
from zrt.tui import tables, tree
from zrt.tui.detail import facts
from zrt.tui.plot import plot
from zrt.tui.state import EVENTS, REPLIES, MonitorState
from zrt.tui.status import tree as status

TREE = """
test: tiny, 64 blocks, context 256, ready
actor                     state     KV pages    queue  busy  tok/s memory p50 ms
test: tiny                ready
├ stage 0, blocks 0-0     1/1
│ └ stage0                ready     ██░░░░  25%     0    0%    0.0           1.2
│   ├ 3-4: attic          ready                                        3G    2.5
│   └ –: cellar           push 50%
├ stage 1, blocks 1-1     0/2
│ ├ stage1.0              load 50%  ██░░░░  25%     0    0%    0.0           1.2
│ └ stage1.1              drained   ██░░░░  25%     0    0%    0.0     2G    1.2
│   ├ rank 0              ready                                              0.4
│   ├ rank 1              ready                                        1G    0.4
│   └ rank 2              ready                                        2G    0.4
└ others
  └ coordinator           ready
""".strip()


def test_the_cluster_is_a_tree_of_stages_replicas_ranks_and_layer_workers() -> None:
    cellar = worker("cellar", state="pushing", layers="", held_bytes=5, hops=0)
    seen = cluster(sessions=0)
    seen.actors = [
        actor("stage0", 0, lend=LendLoad("0-2", workers=[worker("attic"), cellar])),
        actor("stage1.0", 1, state="loading", done_bytes=5, total_bytes=10),
        actor("stage1.1", 1, state="drained", rss_bytes=2**31, group=group(1)),
        ActorInfo("attic", "layer_worker", "ready", rss_bytes=3 << 30),
        ActorInfo("coordinator", "coordinator", "ready"),
    ]
    lines = [line.plain[:80].rstrip() for line in status(seen)]
    assert "\n".join(lines) == TREE


NARROW = """
test: tiny, 64 blocks, context 256, ready
stage1: bad_model: layer 7 is cut off, and the file that should have it is not there
actor                 state  KV pages    queue busy tok/s p50 ms p95 ms sessions
test: tiny            ready
├ stage 0, blocks 0-0 1/1
│ └ stage0            ready  ██░░░░  25%     0   0%   0.0    1.2    3.5        0
└ stage 1, blocks 1-1 0/1
  └ stage1            failed ██░░░░  25%     0   0%   0.0    1.2    3.5        0

session          state    prompt new tok/s ttft ms between tokens epoch pages
0000000000000000 decoding      5  10  20.0      50 ▃▅█                1     0
""".strip()


def test_on_a_terminal_rows_have_what_fits_and_faults_are_told_in_full() -> None:
    seen = cluster(sessions=1)
    seen.actors[1].state = "failed"
    seen.actors[1].fault = "bad_model: layer 7 is cut off, and the file that should have it is not there"
    assert "\n".join(line.plain for line in status(seen, 80)) == NARROW
    for width in (1, 20, 40, 60, 137, 300):
        rows = [line for line in status(seen, width) if line.no_wrap]
        assert len(rows) == 8
        assert all(cell_len(row.plain) <= max(width, 1) for row in rows)
    assert status(seen, 300)[2].plain.split()[-3:] == ["device", "process", "fault"]


def test_of_a_process_its_name_is_shown_without_the_branches() -> None:
    described = [tree.TREE.described(node) for node in tree.nodes(cluster(sessions=0))]
    assert [lines[0].split(maxsplit=1)[1] for lines in described] == [
        "test: tiny",
        "stage 0, blocks 0-0",
        "stage0",
        "stage 1, blocks 1-1",
        "stage1",
    ]


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
    assert tree.TREE.row(tree.TreeNode("x", "x", actor("x", 0, **more))).style == style


def test_a_lost_rank_and_a_lost_worker_are_bad() -> None:
    lost = group(1)
    lost.ranks[1].state, lost.ranks[1].error = "lost", "rank_failed: it died"
    lend = LendLoad(workers=[worker("attic", state="lost")])
    seen = cluster(sessions=0)
    seen.actors = [actor("stage0", 0, group=lost), actor("stage1", 1, lend=lend)]
    bad = [row for row in map(tree.TREE.row, tree.nodes(seen)) if row.style == "bad"]
    assert [row.key for row in bad] == ["stage0 rank 1", "attic"]
    assert "it died" in bad[0].text


@pytest.mark.parametrize(("state", "style"), [("ready", "plain"), ("loading", "warn"), ("lost", "bad")])
def test_a_rank_is_shown_with_its_state_memory_and_last_error(state: str, style: str) -> None:
    ranks = group(1)
    ranks.ranks[1] = RankLoad(1, 7, errors=1, state=state, rss_bytes=5 << 20, error="rank_failed: it was killed")  # type: ignore[arg-type]
    row = tree.TREE.row(tree.TreeNode("x rank 1", "rank 1", actor("x", 0, group=ranks), ranks.ranks[1]))
    assert row.style == style
    for cell in (state, "5M", "h:7", "1 error, the last: rank_failed: it was killed"):
        assert cell in row.text


def test_what_a_stage_waits_for_is_said() -> None:
    node = tree.TreeNode("x", "x", actor("x", 0, lend=LendLoad(waits_for="attic to join")))
    assert "attic to join" in tree.TREE.row(node).text


@pytest.mark.parametrize(
    "name", ["a" * 64, "段落" * 20, "e\u0301" * 20, "tab\tline\nbell\a", "\x1b[31mred", "🧑‍🚀👍🏽" * 9]
)
def test_a_row_has_its_width_whatever_the_names_are(name: str) -> None:
    row = tree.TREE.row(tree.TreeNode(name, name, actor(name, 0)))
    assert cell_len(row.text) == cell_len(tree.TREE.head)
    assert not set(row.text) & set("\t\n\a\x1b")


def test_what_is_cut_shows_it_and_a_column_grows_where_there_is_room() -> None:
    node = tree.TreeNode("x", "├ " + "x" * 40, actor("x", 0))
    narrow, wide = tree.TREE.row(node).text, tree.TREE.fitted([node], 10).row(node).text
    assert narrow.startswith("├ " + "x" * 22 + "… ready")
    assert wide.startswith("├ " + "x" * 32 + "… ready")
    assert tree.TREE.fitted([node], 1000).row(node).text.startswith("├ " + "x" * 37 + "… ready")
    assert tree.TREE.fitted([node], -5).widths == tree.TREE.widths


def test_a_clients_whole_name_is_shown() -> None:
    assert f" {'f' * 16} " in tables.SESSIONS.row(session(7, client=f"client.{'f' * 16}")).text


@pytest.mark.parametrize("width", [None, 80])
@pytest.mark.parametrize("name", ["two\nlines", "\r\x1b[2J\x1b]0;title\a", "\u202egnp", "\x85\u2028", "\udcff"])
def test_a_name_breaks_no_line_of_the_status(name: str, width: int | None) -> None:
    def lines(name: str) -> list[str]:
        seen = cluster(name=name, model=f"/models/{name}", fault=f"{name} is lost")
        seen.actors = [actor(name, 0, lend=LendLoad(waits_for=name)), actor(name, 1, group=group(2))]
        seen.sessions = [session(7, state=name, route=[name], client=name)]
        return [line.plain for line in status(seen, width)]

    found = lines(name)
    assert [line for line in found if "is lost" not in line and escaped(line) != line] == []
    assert len(found) == len(lines("plain"))


def test_what_others_say_does_not_steer_the_terminal() -> None:
    assert (
        escaped("one\ntwo\x1b]0;title\x07 \x9b31m\r", breaks=True) == r"one" + "\n" + r"two\x1b]0;title\x07 \x9b31m\r"
    )


@pytest.mark.parametrize(("order", "first"), [("age", 0), ("tokens", 2), ("pace", 3), ("ttft", 1), ("state", 0)])
def test_sessions_are_sorted(order: str, first: int) -> None:
    all_ = [session(0), session(1, ttft_ms=99.0), session(2, tokens=50), session(3, state="waiting")]
    assert tables.sessions(all_, order, "")[0].session == first


@pytest.mark.parametrize(
    ("wanted", "found"), [("", 4), ("waiting", 1), ("client.0002", 1), ("stage1", 4), ("nothing", 0)]
)
def test_sessions_are_filtered_by_all_that_names_them(wanted: str, found: int) -> None:
    all_ = [session(0), session(1), session(2), session(3, state="waiting")]
    assert len(tables.sessions(all_, "age", wanted)) == found


def test_a_session_in_a_line() -> None:
    assert tables.SESSIONS.row(session(7)).text.rstrip() == (
        "0000000000000007 decoding       5     10    27.0       50 ▃▅█                  1     0 0007             stage0 → stage1"
    )


def test_a_session_in_full_has_the_time_of_each_hop() -> None:
    one = session(7, hops=[HopInfo("stage0", 0.5, 4.0, 0.5), HopInfo("stage1", 1.0, 3.0, 0.0)], network_ms=1.0)
    lines = facts(7, one, cluster(up_ms=2007), [], "")
    assert lines[2] == "asked 2 s ago by client.0007; route stage0 → stage1"
    assert lines[4:] == [
        "ms a token            queue  compute   encode      sum",
        "stage0                 0.50     4.00     0.50     5.00 ██████████░░░░░░░░░░",
        "stage1                 1.00     3.00     0.00     4.00 ████████░░░░░░░░░░░░",
        "network                                           1.00 ██░░░░░░░░░░░░░░░░░░",
    ]


def test_of_many_hops_the_first_are_shown_and_the_others_summed() -> None:
    lines = facts(7, session(7, hops=[HopInfo("s", 1.0, 1.0, 0.0)] * 9), cluster(), [], "")
    assert [line.split()[:3] for line in lines if "more stages" in line] == [["3", "more", "stages"]]


def test_a_drain_in_a_line() -> None:
    (drain,) = cluster().drains
    assert tables.DRAINS.row(drain).text.rstrip() == (
        "stage0             draining      2     1        0      0 1.5 of 9 s     client.1"
    )


def led(recent: list, name: str = "stage0"):
    seen = cluster(actors=1)
    seen.actors[0].name, seen.actors[0].group = name, group(1, recent=recent)
    return seen


def test_each_step_of_a_group_is_a_line_with_every_rank() -> None:
    state = MonitorState()
    state.take(led([step(4), step(5, 500, errors=["", "", "rank_failed"])]), 1000.0)
    first, second = map(tables.REPLIES.row, state.replies)
    assert first.text[9:].split()[:8] == ["stage0", "4", "7", "20", "2:", "420", "400", "410"]
    assert (first.style, second.style) == ("plain", "bad")
    assert "rank 2: rank_failed" in second.text


def test_steps_that_were_told_before_are_not_told_again_and_history_is_bounded() -> None:
    state = MonitorState()
    state.take(led([step(1), step(2)]), 1000.0)
    state.take(led([step(2), step(3)]), 1001.0)
    assert [one.step.serial for one in state.replies] == [1, 2, 3]
    state.take(led([step(1)]), 1002.0)  # the leader was started again
    assert [one.step.serial for one in state.replies] == [1, 2, 3, 1]
    for serial in range(2, REPLIES + 50):
        state.take(led([step(serial)]), 1003.0)
    assert len(state.replies) == REPLIES


def test_events_are_kept_once_each_and_bounded() -> None:
    state = MonitorState()
    state.take(cluster(happened=[happened(1), happened(2)]), 0.0)
    state.take(cluster(happened=[happened(2), happened(3, "death", "is gone")]), 0.0)
    assert [one.serial for one in state.happened] == [1, 2, 3]
    assert [one.serial for one in tables.events(state.happened, "death")] == [3]
    state.take(cluster(happened=[happened(serial) for serial in range(4, EVENTS + 50)]), 0.0)
    assert len(state.happened) == EVENTS


def test_a_new_coordinator_counts_anew_and_what_happened_before_is_still_known() -> None:
    state = MonitorState()
    state.take(cluster(incarnation=1, up_ms=90_000, tokens=500, happened=[happened(9)]), 0.0)
    state.take(cluster(incarnation=2, up_ms=91_000, tokens=0, happened=[happened(1)]), 0.0)
    state.take(cluster(incarnation=2, up_ms=93_000, tokens=60), 0.0)
    assert list(state.pace) == [(30.0, 2)]
    assert [one.serial for one in state.happened] == [9, 1]


def test_a_plot_has_axes_the_newest_at_the_right_and_a_round_number_at_the_top() -> None:
    assert plot("x", [1.0, 2.0, 4.0], 14, 4) == [
        "x: 4.0 now, 4.0 most",
        "    5 ┤      ▅",
        "      ┤    ▃▆█",
        "    0 └    now",
    ]


@pytest.mark.parametrize("values", [[], [0.0], [float("nan")], [float("inf"), 1.0], [-5.0, 2.0], [1e300]])
@pytest.mark.parametrize(("width", "height"), [(80, 10), (1, 1), (8, 3)])
def test_a_plot_has_its_size_whatever_the_values_are(values: list[float], width: int, height: int) -> None:
    assert len(plot("x", values, width, height)) <= max(height, 1)
