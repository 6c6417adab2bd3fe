"""What a person reads while a cluster loads and an answer comes, and of its speed."""

import asyncio
import io
import sys

import pytest
from rich.console import Console

from zrt.runtime.cli import notice as notice_module
from zrt.runtime.cli.notice import Notice, figures
from zrt.runtime.messages.client import Cluster, Finished, Progress, StageShare, Timings
from zrt.runtime.messages.cluster import ActorInfo
from zrt.runtime.process import load_bars
from zrt.runtime.process.load_bars import Bars

OWN, LENDS = StageShare("stage0", "0-9", 5.0, 40.0, 1.0), StageShare("stage1", "10-29", 5.0, 60.0, 1.0, 20.0)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([OWN], ["stage0 (blocks 0-9): 100% of the compute, a token 4.0 ms computing, 0.5 waiting, 0.1 encoding"]),
        ([LENDS], ["stage1 (blocks 10-29): 67% of the compute, its layer workers 33%, a token 6.0 ms computing"]),
        (
            [OWN, LENDS],
            ["0-9): 40% of the compute, a token", "10-29): 40% of the compute, its layer workers 20%, a token"],
        ),
    ],
)
def test_each_stage_has_its_share_and_its_layer_workers_theirs(stages: list[StageShare], said: list[str]) -> None:
    timings = Timings(0.0, 70.0, 20.0, 9.0)
    finished = Finished(
        id="r", reason="length", prompt_tokens=3, completion_tokens=10, seed=7, timings=timings, stages=stages
    )
    lines = figures(finished).splitlines()
    assert len(lines) == len(stages) + 2
    for line, words in zip(lines[1:], said, strict=False):
        assert words in line


def replicas(*done: int) -> Cluster:
    """Two replicas that have loaded so many of ten bytes; the first is ready, whatever it has
    told."""
    actors = [
        ActorInfo(f"stage0.{n}", "block_server", state, stage=0, blocks="0-3", done_bytes=bytes_, total_bytes=10)
        for n, (bytes_, state) in enumerate(zip(done, ("ready", "ready" if done[1] == 10 else "loading"), strict=True))
    ]
    return Cluster(id="", name="test", model="m", ready=True, context=1, num_blocks=4, actors=actors)


@pytest.mark.parametrize("second", [4, 10], ids=["one loads on", "both are ready"])
def test_bars_have_ended_where_a_cluster_is_said_to_be_ready(monkeypatch: pytest.MonkeyPatch, second: int) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(load_bars, "_Screen", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    with Bars() as bars:
        bars.loading(replicas(3, 2))
        bars.finish(replicas(9, second))
        ended = screen.getvalue().rpartition("stage0.0")[2]
        assert "10/10 bytes" in ended
        bars.say("it is ready")
        if second < 10:
            bars.loading(replicas(9, 6))
    after = screen.getvalue().partition("it is ready")[2]
    assert "stage0.0" not in after
    assert ("stage0.1" in after) == (second < 10)


def test_long_hashing_is_said_once_and_short_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(load_bars, "_Screen", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    hashing = [
        ActorInfo(f"stage{number}", "block_server", "loading", stage=number, hashes=nbytes)
        for number, nbytes in enumerate((1 << 20, 3 << 30))
    ]
    with Bars() as bars:
        for _ in range(2):
            bars.loading(Cluster(id="", name="test", model="m", ready=False, context=1, num_blocks=4, actors=hashing))
    assert screen.getvalue().count("hashes") == 1
    assert "stage1 hashes 3.0 GiB of weights, once on this machine" in screen.getvalue()


QUEUED, WAITING = (
    Progress(id="r", phase="queued", done=2, total=3),
    Progress(id="r", phase="waiting", message="stage1 is gone"),
)
REPLAYING, DECODING = Progress(id="r", phase="replaying", done=7, total=9), Progress(id="r", phase="decoding")


async def test_a_log_has_a_line_for_each_wait_that_lasts_and_for_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notice_module, "WAIT_S", 0.1)

    async def said(*phases: Progress, seconds: float = 0.0) -> list[str]:
        for phase in phases:
            notice.progress(phase)
        await asyncio.sleep(seconds)
        return capsys.readouterr().err.splitlines()

    notice = Notice()
    assert await said(QUEUED, DECODING, WAITING, REPLAYING, DECODING, seconds=0.2) == []
    assert await said(QUEUED, seconds=0.2) == ["zrt: the answer is queued, place 3 of 3"]
    assert await said(QUEUED, WAITING, seconds=0.2) == ["zrt: the answer is waiting (stage1 is gone)"]
    notice.broken("tcp://box:1", 15)
    notice.back()
    assert await said(WAITING, seconds=0.2) == []  # a break that was not said in a wait that was
    assert await said(REPLAYING) == []
    notice.piece()
    assert await said(seconds=0.2) == ["zrt: the answer goes on"]
    notice.broken("tcp://box:1", 15)
    broke = "zrt: the connection to tcp://box:1 broke; reconnecting for 15 s at most"
    assert await said(seconds=0.2) == [broke]
    notice.back()
    assert await said(WAITING, seconds=0.2) == [
        "zrt: the connection is back",
        "zrt: the answer is waiting (stage1 is gone)",
    ]
    notice.text()  # it failed
    notice.back()
    assert await said(seconds=0.2) == []


def test_a_terminal_shows_where_an_answer_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    notice = Notice()
    for phase in (QUEUED, Progress(id="r", phase="prefill", done=2, total=5), WAITING, REPLAYING):
        notice.progress(phase)
    shown = screen.getvalue().split("\r\x1b[K")[1:]
    assert shown == ["queued, place 3 of 3", "prefill 2/5", "waiting (stage1 is gone)", "replaying 7/9"]
