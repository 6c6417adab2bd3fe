"""The monitor's keys and views, against one real cluster, which every test leaves as it found
it."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from support.clusters import Local, cluster_file, local_cluster, make_coordinator
from support.loads import load
from support.monitors import WAIT_S, on, screen, until
from support.vocabularies import BACKENDS, write_tokenizer
from textual.command import CommandList
from textual.pilot import Pilot
from textual.widgets import Input

from zrt.actors.block_server.backend import Backend
from zrt.actors.block_server.step_queue import Waiting
from zrt.actors.block_server.turn_loop import TurnLoop
from zrt.runtime.client.client import Client
from zrt.runtime.cluster.file_loader import parse
from zrt.tui.app import Top
from zrt.tui.detail import Detail
from zrt.tui.keys import KEYS, VIEWS
from zrt.tui.lines import Lines
from zrt.tui.screens import Chat, Confirm, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAGES: list[str | None] = ["0-1", "2-3"]
TURN_S = 0.05
LONG = 8000
"""More tokens than any test waits for."""


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be talked to."""
    folder = tmp_path_factory.mktemp("top") / "speaking"
    size = BACKENDS["byte-level"]().get_vocab_size()
    shutil.copytree(
        make_model("llama", vocab_size=size, eos_token_id=None, bos_token_id=None, max_position_embeddings=8192), folder
    )
    write_tokenizer(folder, "byte-level", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[Local]:
    """At the pace of a larger model: the monitor is not to wait for a core."""
    async with local_cluster(folder, STAGES, model_context=8192) as made:
        for server in made.servers:
            slow_down(server.turns)
        yield made


def slow_down(turns: TurnLoop) -> None:
    turn = turns._turn

    async def slow(backend: Backend, steps: list[Waiting]) -> None:
        await asyncio.sleep(TURN_S)
        await turn(backend, steps)

    turns._turn = slow  # type: ignore[method-assign]


@asynccontextmanager
async def asking(cluster: Local, count: int) -> AsyncIterator[None]:
    """So many sessions run, and none does afterwards."""
    async with Client(cluster.coordinator.endpoint) as client, load(client, count, LONG):
        yield
    async with asyncio.timeout(WAIT_S):
        while len(cluster.coordinator.generations):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def opened(
    cluster: Local, folder: Path, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The monitor, once it has heard of the cluster."""
    top = Top(cluster.coordinator.endpoint, folder)
    async with top.run_test(size=size) as pilot:
        await until(pilot, lambda: "stage1" in screen(top))
        yield top, pilot


def exports(folder: Path) -> dict[str, str]:
    return {path.suffix: path.read_text() for path in folder.glob("zrt-top-*")}


async def test_every_view_fits_a_small_terminal(cluster: Local, tmp_path: Path) -> None:
    async with asking(cluster, 2), opened(cluster, tmp_path) as (top, pilot):
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
        for view in VIEWS[1:]:
            await pilot.press("tab")
            assert f"[{view}]" in screen(top)


async def test_a_session_is_opened_read_copied_and_cancelled(cluster: Local, tmp_path: Path) -> None:
    async with asking(cluster, 1), opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("2")
        await until(pilot, lambda: top.query_one("#sessions", Lines).item is not None)
        await pilot.press("enter")
        assert isinstance(top.screen, Detail)
        await until(pilot, lambda: "compute" in screen(top))
        await until(pilot, lambda: isinstance(top.screen, Detail) and len(top.screen._text) > 20)
        await pilot.press("y")
        assert len(top.clipboard) > 20
        await pilot.press("c")
        assert isinstance(top.screen, Confirm)
        await pilot.press("n")
        assert len(cluster.coordinator.generations) == 1
        await pilot.press("c", "y")
        await until(pilot, lambda: len(cluster.coordinator.generations) == 0)
        await until(pilot, lambda: "finished: cancelled" in screen(top))


async def test_a_block_server_is_drained_and_undrained(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await on(pilot, top, "stage1")
        await pilot.press("d")
        top.screen.query_one(Input).value = "x"
        await pilot.press("enter")
        assert isinstance(top.screen, Confirm)
        top.screen.query_one(Input).value = "3"
        await pilot.press("enter")
        await until(pilot, lambda: "drained" in screen(top))
        drain = (await cluster.client.status()).drains[-1]
        assert (drain.name, drain.timeout_ms) == ("stage1", 3000)
        assert "NOT READY" in screen(top)
        await pilot.press("3")
        await until(pilot, lambda: "of 3 s" in screen(top))
        await on(pilot, top, "stage1")
        await pilot.press("u", "y")
        await until(pilot, lambda: cluster.coordinator.roster.pipeline.ready)


async def test_what_fails_or_cannot_be_is_told(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path, (120, 30)) as (top, pilot):
        await pilot.press("home", "d")
        assert [one.message for one in top._notifications] == ["put the cursor on a block server of the cluster"]
        await on(pilot, top, "stage1")
        await pilot.press("r", "y")
        await until(pilot, lambda: any("no `zrt up`" in one.message for one in top._notifications))


async def test_the_display_holds_and_exports_and_explains(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("space")
        assert "paused" in screen(top)
        await pilot.press("space", "X", "x", "l")
        await until(pilot, lambda: len(exports(tmp_path)) == 2)
        written = json.loads(exports(tmp_path)[".json"])
        assert written["name"] == "test"
        assert all(len(one["session"]) == 16 for one in written["sessions"])
        assert "stage1" in exports(tmp_path)[".svg"]
        assert top.theme == "textual-light"
        await on(pilot, top, "stage1")
        await pilot.press("y")
        assert "stage1" in top.clipboard
        await pilot.press("enter")
        assert isinstance(top.screen, Page)
        assert "process" in screen(top)
        await pilot.press("escape", "question_mark")
        assert "another order of sessions" in screen(top)
        await pilot.press("escape", "q")
        assert top.return_code == 0


async def test_every_key_is_explained_and_has_a_command(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path, (100, 40)) as (top, pilot):
        await pilot.press("question_mark")
        said = screen(top)
        for binding in KEYS:
            key = {"question_mark": "?", "slash": "/"}.get(binding.key, binding.key)
            assert key in said or key in "12345?", f"{key} is not explained"
        await pilot.press("escape")
        commands = {command.title for command in top.get_system_commands(top.screen)}
        assert {"zrt: drain", "zrt: chat", "zrt: export", "zrt: sessions"} <= commands
        assert "zrt: cancel" not in commands  # there is no session under the cursor
        await pilot.press("ctrl+p")
        await until(pilot, lambda: "zrt: drain" in screen(top) or "Theme" in screen(top))
        ours = top.screen.query_one(CommandList).get_option_at_index(0)
        assert "zrt: " in str(ours.prompt)
        await pilot.press(*"zrt: sessions", "enter")
        await until(pilot, lambda: "[sessions]" in screen(top))


async def test_sessions_are_filtered_and_sorted_by_keys(cluster: Local, tmp_path: Path) -> None:
    async with asking(cluster, 3), opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("2", "s")
        assert "by tokens" in screen(top)
        await until(pilot, lambda: len(top.query_one("#sessions", Lines)._items) == 3)
        name = f"{next(cluster.coordinator.generations.infos()).session:016x}"
        await pilot.press("slash", *name, "enter")
        assert len(top.query_one("#sessions", Lines)._items) == 1
        await pilot.press("escape")
        assert len(top.query_one("#sessions", Lines)._items) == 3


async def test_a_chat_is_held_with_the_cluster(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("t")
        chat = top.screen
        assert isinstance(chat, Chat)
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: bool(chat._answer))
        await pilot.press("escape")  # the answer is long
        await until(pilot, lambda: bool(chat._conversation.turns) or bool(chat._said))
        assert chat._said == ""
        assert [one["role"] for one in chat._conversation.messages] == ["user", "assistant"]
        await pilot.press(*"/undo", "enter")
        await until(pilot, lambda: "taken back: hi" in screen(top))
        assert chat._conversation.turns == []
        await pilot.press("escape")
        assert top.screen is not chat


async def test_a_chat_whose_context_is_full_goes_on(cluster: Local, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as (top, pilot):
        await pilot.press("t")
        chat = top.screen
        assert isinstance(chat, Chat)
        for _ in range(3):
            chat._conversation.ask("x" * 3000)
            chat._conversation.answered("y")
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: bool(chat._answer))
        await pilot.press("escape")
        await until(pilot, lambda: "the oldest 1 turn left out" in screen(top))
        assert len(chat._conversation.turns) == 3


async def test_a_lost_coordinator_is_told_and_another_found(cluster: Local, folder: Path, tmp_path: Path) -> None:
    """The coordinator of its own is replaced again and again."""
    conf = parse(cluster_file(folder, STAGES), "test")
    first = make_coordinator(conf, folder)
    await first.start()
    top = Top(first.endpoint, tmp_path)
    async with top.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "test: " in screen(top))
        for name in ("another", "third"):
            await first.stop()
            await until(pilot, lambda: "trying again" in screen(top) and "LOST, as of " in screen(top))
            await until(pilot, lambda: "`zrt up` " in screen(top))  # the whole message
            assert top._tables["cluster"].old
            text = cluster_file(folder, STAGES, cluster_listen=top.feed.endpoint, cluster_name=name)
            first = make_coordinator(parse(text, "test"), folder)
            await first.start()
            await until(pilot, lambda name=name: name in screen(top) and "trying again" not in screen(top))  # type: ignore[misc]
            assert not top._tables["cluster"].old
        await first.stop()
