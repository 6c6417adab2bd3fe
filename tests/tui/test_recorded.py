"""The monitor with recorded snapshots: pictures of every view as they were looked at once, large
clusters, and snapshots that make no sense.

    ZRT_PICTURES=write python -m pytest tests/tui/test_recorded.py

draws the pictures anew; look at them before they are committed.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.monitors import screen, until
from support.snapshots import actor, cluster, group, happened, session, step, worker
from textual.pilot import Pilot

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo, HopInfo
from zrt.runtime.messages.stats import KvStats, LendLoad
from zrt.tui.app import Top
from zrt.tui.keys import VIEWS
from zrt.tui.lines import Lines
from zrt.tui.plot import GUTTER

PICTURES = Path(__file__).parent / "pictures"
NOWHERE = "tcp://127.0.0.1:9"
AT = 1_700_000_000.0
SOON_S = 10.0
"""By then a view is drawn, on a machine that has much else to do."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@asynccontextmanager
async def showing(seen: Cluster, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The monitor as if it had just heard this."""
    top = Top(NOWHERE, Path())
    top.feed.run = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    top.feed.trouble = ""
    async with top.run_test(size=size) as pilot:
        take(top, seen)
        yield top, pilot


def take(top: Top, seen: Cluster) -> None:
    top.state.take(seen, AT)
    top._draw()


def recorded() -> Cluster:
    """A cluster with something of everything: ranks, layer workers, a drain, a death, long names
    and wide ones."""
    seen = cluster(sessions=0, name="wide 段落 cluster", up_ms=60_000)
    wide = "服务器-" * 6
    seen.actors = [
        actor("stage0", 0, group=group(40, recent=[step(39), step(40, errors=["", "rank_failed", ""])])),
        actor("stage1.0", 1, busy_share=0.93, waiting=12, tokens_s=1234.5, kv=KvStats(2, 3, 5, 10, 16)),
        actor("stage1.1", 1, state="draining", silent_ms=9000),
        actor(wide, 2, state="loading", done_bytes=3, total_bytes=8),
        actor("a-very-long-name-of-a-block-server-in-another-room", 3, lend=LendLoad("0", workers=[worker("attic")])),
        actor("stage4", 4, state="failed", fault="bad_model: layer 7 is cut off"),
        ActorInfo("attic", "layer_worker", "ready", rss_bytes=3 << 30, host="here", pid=9),
        ActorInfo("up", "supervisor", "ready", rss_bytes=40 << 20, host="here", pid=8),
    ]
    for number, state in enumerate(("decoding", "prefill", "queued", "waiting", "parked", "replaying", "preempted")):
        seen.sessions.append(session(number, 40 + number, state=state, client=f"client.{wide}"))
    seen.sessions[0].gaps_ms = [10.0, 12.0, 11.0, 40.0, 10.0, 9.0]
    seen.sessions[0].hops = [HopInfo("stage0", 0.5, 4.0, 0.1), HopInfo(wide, 1.5, 7.0, 0.2)]
    seen.sessions[0].route, seen.sessions[0].network_ms = ["stage0", wide], 0.75
    seen.sessions[3].fault = "stage1.1 is gone"
    seen.happened = [
        happened(1),
        happened(2, "death", "was ended by signal 9; it is started again"),
        happened(3, "reroute", "2 sessions take another route"),
        happened(4, "drain", "is being drained for 9 s at most"),
    ]
    return seen


SCENES: dict[str, tuple[str, ...]] = {
    "cluster": ("1", "down", "down"),
    "cluster-light": ("1", "l"),
    "cluster-right": ("1", *["right"] * 9),
    "sessions": ("2",),
    "session": ("2", "enter"),
    "drains": ("3", "3"),
    "events": ("4", "down"),
    "throughput": ("5",),
    "help": ("question_mark",),
    "drain": ("1", *["down"] * 7, "d"),
    "filter": ("2", "slash", "p", "a", "r"),
}


@pytest.mark.parametrize("scene", SCENES)
async def test_a_view_looks_as_it_did(scene: str, tmp_path: Path) -> None:
    stored = PICTURES / f"{scene}.svg"
    async with showing(recorded()) as (top, pilot):
        for second in range(1, 40):
            later = recorded()
            later.up_ms, later.tokens = 60_000 + second * 1000, second * (20 + second % 7)
            later.happened = []
            top.state.take(later, AT)
        await pilot.press(*SCENES[scene])
        top._draw()
        if os.environ.get("ZRT_PICTURES") == "write":
            await pilot.pause(2.0)
            stored.write_text(picture(top))
        drawn, deadline = "", time.monotonic() + SOON_S
        while drawn != stored.read_text() and time.monotonic() < deadline:
            await pilot.pause(0.05)
            drawn = picture(top)
    (tmp_path / stored.name).write_text(drawn)
    assert drawn == stored.read_text(), f"{tmp_path / stored.name} differs from {stored}"


def picture(top: Top) -> str:
    """The screen, without what is another each time, the ids, and without fonts of elsewhere."""
    drawn = re.sub(r"@font-face {.*?}\s*", "", top.export_screenshot(title="zrt top"), flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", drawn).rstrip("\n") + "\n"


async def test_a_large_cluster_costs_what_is_seen() -> None:
    """Of 500 sessions and 64 block servers the lines that changed are drawn, and no others."""
    async with showing(cluster(actors=64, sessions=500)) as (top, pilot):
        await pilot.press("2")
        lines = top.query_one("#sessions", Lines)
        await until(pilot, lambda: lines.drawn > 10 and "000000000000000a" in screen(top))
        await pilot.pause(0.1)
        before = lines.drawn
        take(top, cluster(actors=64, sessions=500))
        await pilot.pause(0.1)
        assert lines.drawn == before
        changed = cluster(actors=64, sessions=500)
        changed.sessions[3].completion_tokens = 77
        changed.sessions[400].completion_tokens = 77
        take(top, changed)
        await pilot.pause(0.1)
        assert lines.drawn == before + 1
        await pilot.press("end")
        assert "00000000000001f3" in screen(top)


async def test_the_cursor_stays_on_its_session_when_others_come_and_go() -> None:
    async with showing(cluster(sessions=30)) as (top, pilot):
        await pilot.press("2", *["down"] * 10)
        lines = top.query_one("#sessions", Lines)
        for gone in (3, 9, 0):
            seen = cluster(sessions=30)
            del seen.sessions[:gone]
            take(top, seen)
            assert lines.item.session == 10
        take(top, cluster(sessions=0))
        await pilot.press("down", "up", "enter", "end", "y")
        assert lines.item is None
        assert "no session" in screen(top)


async def test_five_thousand_sessions_are_shown_and_moved_through() -> None:
    async with showing(cluster(sessions=5000)) as (top, pilot):
        await pilot.press("2")
        began = time.monotonic()
        await pilot.press("end", "pageup", "home", "s", "s", "s", "s", "s")
        assert time.monotonic() - began < 10
        assert "0000000000000000" in screen(top)


@pytest.mark.parametrize("size", [(20, 5), (1, 1)])
async def test_any_size_of_terminal_is_borne(size: tuple[int, int]) -> None:
    async with showing(recorded()) as (top, pilot):
        for key in "135":
            await pilot.press(key)
            await pilot.resize_terminal(*size)
            top._draw()
            await pilot.press("end", "right")
            assert len(screen(top).split("\n")) == size[1]
            await pilot.resize_terminal(80, 24)
        await pilot.press("2", "enter")
        await pilot.resize_terminal(*size)
        await pilot.press("escape", "question_mark")
        await pilot.resize_terminal(80, 24)
        deadline = time.monotonic() + SOON_S
        while "zrt top" not in screen(top):
            assert time.monotonic() < deadline
            await pilot.pause(0.05)


async def test_plots_fill_the_terminal_though_nothing_new_comes() -> None:
    async with showing(recorded()) as (top, pilot):
        await pilot.press("space", "5")  # paused: nobody draws but a view that is chosen
        for width in (80, 120, 60):
            await pilot.resize_terminal(width, 24)
            await until(pilot, lambda width=width: screen(top).count(f"└{'now'.rjust(width - GUTTER)}") == 2)  # type: ignore[misc]


def _nonsense() -> Cluster:
    nan, inf, text = float("nan"), float("inf"), "\x1b[31m\x9b\x07\n\t\u202e" + "x" * 3000
    seen = cluster(name=text, model=text, up_ms=-5, tokens=-7)
    seen.actors = [
        actor(text, 2**40, busy_share=nan, tokens_s=inf, turn_p50_ms=-inf, rss_bytes=-(2**70), kv=KvStats(0, 0, 9, 4)),
        actor(text, -7, state="dancing", done_bytes=9, total_bytes=3, group=group(3, recent=[step(1, 0)])),
        actor("", 0, group=group(2, ranks=[], recent=[step(9, errors=[text], forward_us=[], drain_us=[])])),
        ActorInfo("", "", "ready", lend=LendLoad(workers=[worker(text, held_bytes=9, total_bytes=2, state="x")] * 2)),
    ]
    seen.sessions = [
        session(2**63, state=text, gaps_ms=[inf, -1.0, 0.0], tokens_s=nan, route=[text], client=text, ttft_ms=inf),
        session(2**63, gaps_ms=[-1.0], hops=[HopInfo(text, inf, 0.0, -1.0)], network_ms=inf, fault=text),
    ]
    seen.drains = [*seen.drains, *seen.drains]
    seen.happened = [happened(5, text, text), happened(5, "death", text), happened(1, "x", "")]
    seen.happened[0].at = 0.0
    return seen


async def test_snapshots_that_make_no_sense_are_shown_as_they_are() -> None:
    async with showing(_nonsense()) as (top, pilot):
        for key in "12345":
            await pilot.press(key, "down", "enter")
            await pilot.pause()
            shown = screen(top)
            assert not set(shown) & set("\x1b\x9b\x07\t"), key
            if len(top.screen_stack) > 1:
                await pilot.press("escape")
            take(top, cluster())
            take(top, _nonsense())
        assert top.return_code is None


@pytest.mark.parametrize("view", ["cluster", "throughput"])
async def test_without_colours_the_cursor_is_still_seen(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with showing(recorded()) as (top, pilot):
        await pilot.press(str(VIEWS.index(view) + 1))
        await pilot.pause()
        drawn = [segment for strip in top.screen._compositor.render_strips() for segment in strip]
        colours = {segment.style.color.get_truecolor() for segment in drawn if segment.style and segment.style.color}
        assert all(colour.red == colour.green == colour.blue for colour in colours)
        if view != "throughput":
            assert any(segment.style is not None and segment.style.reverse for segment in drawn)
