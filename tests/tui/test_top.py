"""The monitor's keys and views, against a real cluster; and its work with a large one."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from clusters import Local, cluster_file, local_cluster, make_coordinator
from loads import load
from snapshots import cluster as snapshot
from textual import app as textual_app
from textual.pilot import Pilot
from textual.widgets import Input, Static
from vocabularies import BACKENDS, write_tokenizer

from zrt.runtime.config import parse
from zrt.tui.app import Top
from zrt.tui.lines import Lines
from zrt.tui.screens import Chat, Confirm, Detail, Help

WAIT_S = 30.0
STAGES: list[str | None] = ["0-1", "2-3"]
LONG = 8000
"""More tokens than any test waits for."""


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", max_position_embeddings=8192)


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Local]:
    async with local_cluster(folder, STAGES, model_context=8192) as made:
        yield made


@pytest.fixture(autouse=True)
def _cluster_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot takes the process's idleness for a sign that a key was handled; with a busy cluster inside, it waits in vain."""

    async def soon(min_sleep: float = 0, max_sleep: float = 0) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(textual_app, "wait_for_idle", soon)


@asynccontextmanager
async def opened(
    cluster: Local, folder: Path, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The monitor, once it has heard of the cluster."""
    top = Top(cluster.coordinator.endpoint, folder)
    async with top.run_test(size=size) as pilot:
        await until(pilot, lambda: "stage1" in screen(top))
        yield top, pilot


async def until(pilot: Pilot[None], seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not seen():
            await pilot.pause(0.05)


def exports(folder: Path) -> dict[str, str]:
    return {path.suffix: path.read_text() for path in folder.glob("zrt-top-*")}


def screen(top: Top) -> str:
    """What is on the terminal, as text."""
    return "\n".join(strip.text.rstrip() for strip in top.screen._compositor.render_strips())


async def on(pilot: Pilot[None], top: Top, name: str) -> None:
    """Put the cursor on a process."""
    lines = top.query_one("#cluster", Lines)
    await pilot.press("1", "home")
    for _ in range(10):
        if lines.row is not None and lines.row.key == name:
            return
        await pilot.press("down")
    raise AssertionError(f"{name} is not there")


async def test_every_view_fits_a_small_terminal(cluster: Local, tmp_path: Path) -> None:
    async with load(cluster.client, 2, LONG), opened(cluster, tmp_path) as (top, pilot):
        for key, shown in (
            ("2", "decoding"),
            ("3", "fan-out"),
            ("4", "is ready"),
            ("5", "tokens/s"),
            ("1", "KV pages"),
        ):
            await pilot.press(key)
            await until(pilot, lambda shown=shown: shown in screen(top))  # type: ignore[misc]
            lines = screen(top).split("\n")
            assert len(lines) == 24
            assert all(len(line) <= 80 for line in lines)
        await pilot.press("tab")
        assert "[sessions]" in screen(top)


async def test_a_session_is_opened_read_and_cancelled(cluster: Local, tmp_path: Path) -> None:
    async with load(cluster.client, 1, LONG), opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("2")
        await until(pilot, lambda: top.query_one("#sessions", Lines).item is not None)
        await pilot.press("enter")
        assert isinstance(top.screen, Detail)
        await until(pilot, lambda: "compute" in screen(top))
        await until(pilot, lambda: len(str(top.screen.query_one("#text", Static).render())) > 20)
        await pilot.press("escape", "c")
        assert isinstance(top.screen, Confirm)
        await pilot.press("n")
        assert len(cluster.coordinator.generations) == 1
        await pilot.press("c", "y")
        await until(pilot, lambda: len(cluster.coordinator.generations) == 0)


async def test_a_block_server_is_drained_and_undrained(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await on(pilot, top, "stage1")
        await pilot.press("d")
        top.screen.query_one(Input).value = "3"
        await pilot.press("enter")
        await until(pilot, lambda: "drained" in screen(top))
        (drain,) = (await cluster.client.status()).drains
        assert (drain.name, drain.timeout_ms) == ("stage1", 3000)
        await on(pilot, top, "stage1")
        await pilot.press("u", "y")
        await until(pilot, lambda: cluster.coordinator.roster.ready)


async def test_what_fails_is_told(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path, (120, 30)) as (top, pilot):
        await on(pilot, top, "stage1")
        await pilot.press("r", "y")
        await until(pilot, lambda: any("no `zrt up`" in one.message for one in top._notifications))


async def test_the_display_holds_and_exports_and_explains(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("space")
        assert "paused" in screen(top)
        await pilot.press("space", "X", "x", "l")
        await until(pilot, lambda: len(exports(tmp_path)) == 2)
        assert json.loads(exports(tmp_path)[".json"])["name"] == "test"
        assert "stage1" in exports(tmp_path)[".svg"]
        assert top.theme == "textual-light"
        await pilot.press("question_mark")
        assert isinstance(top.screen, Help)
        await pilot.press("escape")
        await pilot.press("y")
        assert "test" in top.clipboard
        await pilot.press("q")
        assert top.return_code == 0


async def test_sessions_are_filtered_and_sorted_by_keys(cluster: Local, tmp_path: Path) -> None:
    async with load(cluster.client, 3, LONG), opened(cluster, tmp_path) as (top, pilot):
        await cluster.client.drain("stage1", timeout=0)
        await pilot.press("2", "s")
        assert "by tokens" in screen(top)
        await until(pilot, lambda: len(top.query_one("#sessions", Lines)._items) == 3)
        name = f"{next(cluster.coordinator.generations.infos()).session:016x}"
        await pilot.press("slash", *name, "enter")
        assert len(top.query_one("#sessions", Lines)._items) == 1
        await pilot.press("escape")
        assert len(top.query_one("#sessions", Lines)._items) == 3


async def test_a_chat_is_held_with_the_cluster(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "speaking"
    size = BACKENDS["byte-level"]().get_vocab_size()
    shutil.copytree(make_model("llama", vocab_size=size, eos_token_id=None, bos_token_id=None), folder)
    write_tokenizer(folder, "byte-level", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    async with local_cluster(folder, STAGES) as cluster, opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("t")
        chat = top.screen
        assert isinstance(chat, Chat)
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: len(chat._messages) >= 2 or bool(chat._trouble))
        assert chat._trouble == ""
        assert [one["role"] for one in chat._messages[:2]] == ["user", "assistant"]
        await pilot.press("escape")
        assert top.screen is not chat


async def test_a_lost_coordinator_is_told_and_another_found(cluster: Local, folder: Path, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await cluster.coordinator.stop()
        await until(pilot, lambda: "trying again" in screen(top))
        assert "stage1" in screen(top)
        conf = parse(cluster_file(folder, STAGES, cluster_listen=top.feed.endpoint, cluster_name="another"), "test")
        another = make_coordinator(conf, folder)
        await another.start()
        try:
            await until(pilot, lambda: "another" in screen(top) and "trying again" not in screen(top))
        finally:
            await another.stop()


async def test_a_large_cluster_costs_what_is_seen(tmp_path: Path) -> None:
    """Of 500 sessions and 64 block servers the lines that changed are drawn, and no others."""
    top = Top("tcp://127.0.0.1:9", tmp_path)
    async with top.run_test(size=(80, 24)) as pilot:
        top._take(snapshot(actors=64, sessions=500))
        await pilot.press("2")
        lines = top.query_one("#sessions", Lines)
        await until(pilot, lambda: lines.drawn > 10 and "000000000000000a" in screen(top))
        await pilot.pause(0.6)
        before = lines.drawn
        top._take(snapshot(actors=64, sessions=500))
        await pilot.pause(0.6)
        assert lines.drawn == before
        changed = snapshot(actors=64, sessions=500)
        changed.sessions[3].completion_tokens = 77
        changed.sessions[400].completion_tokens = 77
        top._take(changed)
        await pilot.pause(0.6)
        assert lines.drawn == before + 1
        await pilot.press("end")
        assert "00000000000001f3" in screen(top)
