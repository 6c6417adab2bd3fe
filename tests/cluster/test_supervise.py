"""Supervision, with real child processes: readiness, death, restarts, stopping, and no orphan left
behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
from support.peers import PATIENCE_S, no_descriptors, until

from zrt.runtime.actor.actor import Actor
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.members import Shutdown
from zrt.runtime.process.lifeline import DEATH_FD, PARENT
from zrt.runtime.process.spawn import WORD_BYTES, WORDS, Ready
from zrt.runtime.process.supervisor import Child, ChildObserver, Death, RestartPolicy, Supervisor

CHILDREN = Path(__file__).parent / "children"
QUICK = RestartPolicy(budget=3, window_s=60, first_s=0.01, most_s=0.05)


def words(*verbs: str, program: str = "child.py") -> list[str]:
    return [sys.executable, str(CHILDREN / program), *verbs]


class Family(ChildObserver):
    """A supervisor and what it told."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self.readies: list[tuple[str, Ready]] = []
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(self, sink=lambda name, line: self.lines.append((name, line)))

    def on_ready(self, child: Child, ready: Ready) -> None:
        self.readies.append((child.name, ready))

    def on_death(self, child: Child, death: Death) -> None:
        assert child.name == death.name
        self.deaths.append(death)

    def spawn(
        self, *verbs: str, name: str = "child", ready_s: float = PATIENCE_S, restart: RestartPolicy | None = None
    ) -> Child:
        return self.supervisor.spawn(name, words(*verbs), ready_s=ready_s, restart=restart)


@pytest_asyncio.fixture
async def family() -> AsyncIterator[Family]:
    made = Family()
    yield made
    made.supervisor.kill()
    await made.supervisor.stop(PATIENCE_S)


def _gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that its new parent has not reaped counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# ---- readiness -----------------------------------------------------------------------------------


async def test_a_child_is_ready_when_it_says_where_it_is(family: Family) -> None:
    child = family.spawn("hold", "ready", "wait")
    ready = await child.ready()
    assert ready == Ready("tcp://127.0.0.1:1", child.pid)
    assert child.incarnation == child.pid
    assert family.readies == [("child", ready)]
    assert await child.ready() == ready
    assert os.getsid(child.pid) == child.pid != os.getsid(0)  # a terminal's Ctrl-C does not reach it


async def test_a_child_that_reports_a_fault_fails_with_it_and_is_not_started_again(family: Family) -> None:
    child = family.spawn("hold", "failed=bad_model", "exit=1", restart=QUICK)
    with pytest.raises(ZrtError, match="as it was told to") as raised:
        await child.ready()
    assert (raised.value.kind, raised.value.where) == ("bad_model", "child.py")
    assert [(death.exit, death.restarting) for death in family.deaths] == [(1, False)]


async def test_a_child_that_dies_before_it_is_ready_fails_with_its_last_words(family: Family) -> None:
    child = family.spawn("hold", "say=something is wrong", "exit=3")
    with pytest.raises(ZrtError, match=r"ended with status 3; its last words:\nsomething is wrong") as raised:
        await child.ready()
    assert raised.value.kind == "internal"
    assert child.pid == 0


@pytest.mark.parametrize(
    "verbs", [("hold", "say=stuck", "wait"), ("close", "say=stuck", "wait")], ids=["silent", "closed"]
)
async def test_a_child_that_is_not_ready_in_time_is_killed(family: Family, verbs: tuple[str, ...]) -> None:
    child = family.spawn(*verbs, ready_s=0.5)
    with pytest.raises(ZrtError, match="child was not ready within") as raised:
        await child.ready()
    assert raised.value.kind == "deadline"
    assert [death.exit for death in family.deaths] == [-signal.SIGKILL]


async def test_a_stopped_child_is_not_ready_in_time_either(family: Family) -> None:
    child = family.spawn("wait", ready_s=0.3)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ZrtError) as raised:
        await child.ready()
    assert raised.value.kind == "deadline"


async def test_a_program_that_cannot_be_run_is_named(family: Family) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for program in ("/no/such/program", str(Path(__file__))):
        with pytest.raises(ZrtError, match=program) as raised:
            family.supervisor.spawn("child", [program])
        assert raised.value.kind == "bad_config"
    assert family.supervisor.children == {}
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_name_is_used_once(family: Family) -> None:
    child = family.spawn("wait")
    with pytest.raises(ZrtError, match="child called child already"):
        family.spawn("wait")
    await child.stop(PATIENCE_S)
    family.supervisor.remove(child)
    family.spawn("wait")


async def test_spawning_from_another_thread_is_refused(family: Family) -> None:
    """Its end would be taken for the parent's death."""
    errors: list[ZrtError] = []

    async def spawn() -> None:
        try:
            family.spawn("wait")
        except ZrtError as error:
            errors.append(error)

    thread = threading.Thread(target=asyncio.run, args=(spawn(),))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [error.kind for error in errors] == ["internal"]
    assert "main" in errors[0].message


# ---- death ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "status"), [("exit=0", 0), ("exit=7", 7), ("die=SIGSEGV", -11), ("die=SIGKILL", -9)])
async def test_a_death_is_told_with_its_status(family: Family, tmp_path: Path, verb: str, status: int) -> None:
    child = family.spawn("hold", "ready", f"until={tmp_path / 'go'}", verb)
    pid = (await child.ready()).incarnation
    (tmp_path / "go").touch()
    await until(lambda: bool(family.deaths))
    assert family.deaths == [Death("child", pid, pid, status, False, "")]
    assert _gone(pid)
    with pytest.raises(ZrtError):
        await child.ready()


async def test_what_it_says_is_passed_on_and_its_last_lines_are_kept(family: Family) -> None:
    family.spawn("hold", "out=to stdout", "ready", "flood=500", "say=last line", "partial=no end", "exit=1")
    await until(lambda: bool(family.deaths))
    lines = [line for _, line in family.lines]
    assert lines == ["to stdout", *(f"line {number}" for number in range(500)), "last line", "no end"]
    kept = family.deaths[0].words.split("\n")
    assert len(kept) == WORDS
    assert kept[-2:] == ["last line", "no end"]


async def test_a_line_without_end_is_bounded(family: Family) -> None:
    family.spawn("hold", "ready", f"partial={'x' * 60_000}", "exit=1")
    await until(lambda: bool(family.deaths))
    assert max(len(line) for _, line in family.lines) == WORD_BYTES
    assert sum(len(line) for _, line in family.lines) == 60_000


async def test_what_a_child_leaves_in_its_process_group_dies_with_it(family: Family, tmp_path: Path) -> None:
    stray = tmp_path / "stray"
    family.spawn("hold", f"stray={stray}", "ready", "die=SIGKILL")
    await until(lambda: bool(family.deaths))
    pid = int(stray.read_text())
    await until(lambda: _gone(pid))


# ---- restarts ------------------------------------------------------------------------------------


async def test_a_child_starts_again_within_its_budget(family: Family, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    child = family.spawn("hold", f"count={starts}", "ready", "exit=1", restart=QUICK)
    await until(lambda: len(family.deaths) == 4)
    assert [death.restarting for death in family.deaths] == [True, True, True, False]
    assert len(starts.read_text().splitlines()) == 4
    assert child.restarts == 3
    incarnations = {death.incarnation for death in family.deaths}
    assert len(incarnations) == 4
    assert 0 not in incarnations
    with pytest.raises(ZrtError, match="ended with status 1"):
        await child.ready()


async def test_ready_waits_through_restarts(family: Family, tmp_path: Path) -> None:
    """It dies twice before it gets ready."""
    script = (
        'if [ -e "$1/2" ]; then exec "${@:2}"; elif [ -e "$1/1" ]; then touch "$1/2"; else touch "$1/1"; fi; exit 5'
    )
    argv = ["bash", "-c", script, "bash", str(tmp_path), *words("hold", "ready", "wait")]
    child = family.supervisor.spawn("child", argv, restart=QUICK)
    ready = await child.ready()
    assert ready.incarnation == child.pid
    assert [(death.exit, death.restarting, death.incarnation) for death in family.deaths] == [(5, True, 0)] * 2


async def test_a_killed_child_comes_back_with_the_words_it_has_then(family: Family) -> None:
    child = family.spawn("hold", "ready", "wait", restart=QUICK)
    first = await child.ready()
    child.argv = [*child.argv[:-1], "say=second", "wait"]
    child.kill()
    await until(lambda: ("child", "second") in family.lines)
    second = await child.ready()
    assert second.incarnation != first.incarnation
    assert [ready for _, ready in family.readies] == [first, second]


async def test_pauses_between_restarts_double_up_to_a_bound(family: Family) -> None:
    rule = RestartPolicy(budget=4, window_s=60, first_s=0.1, most_s=0.25)
    times: list[float] = []

    class Clock(ChildObserver):
        def on_death(self, child: Child, death: Death) -> None:
            times.append(time.monotonic())

    supervisor = Supervisor(Clock())
    supervisor.spawn("child", ["false"], restart=rule)
    await until(lambda: len(times) == 5)
    pauses = [after - before for before, after in pairwise(times)]
    for pause, least in zip(pauses, [0.1, 0.2, 0.25, 0.25], strict=True):
        assert pause >= least * 0.9


async def test_a_program_that_vanished_cannot_be_restarted_and_that_is_told(family: Family, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o700)
    child = family.supervisor.spawn("child", [str(program)], restart=QUICK)
    program.unlink()
    child.kill()
    await until(lambda: len(family.deaths) == 2)
    assert [(death.exit, death.restarting) for death in family.deaths] == [(-9, True), (127, False)]
    with pytest.raises(ZrtError) as raised:
        await child.ready()
    assert raised.value.kind == "bad_config"


async def test_a_restart_that_finds_no_descriptor_is_tried_again(family: Family) -> None:
    child = family.spawn("hold", "ready", "wait", restart=QUICK)
    await child.ready()
    with no_descriptors():
        child.kill()
        await until(lambda: len(family.deaths) == 2)
    assert str(family.deaths[1]) == "child cannot be started: [Errno 24] Too many open files"
    assert family.deaths[1].restarting
    await until(lambda: len(family.readies) == 2)


# ---- stopping ------------------------------------------------------------------------------------


async def test_stop_ends_all_children_and_starts_none_again(family: Family) -> None:
    children = [family.spawn("hold", "ready", "wait", name=f"child{number}", restart=QUICK) for number in range(4)]
    pids = [(await child.ready()).incarnation for child in children]
    await family.supervisor.stop(PATIENCE_S)
    assert all(_gone(pid) for pid in pids)
    assert sorted((death.name, death.exit, death.restarting) for death in family.deaths) == [
        (f"child{number}", -signal.SIGTERM, False) for number in range(4)
    ]
    with pytest.raises(ZrtError) as raised:
        family.spawn("wait", name="late")
    assert raised.value.kind == "cancelled"


@pytest.mark.parametrize("hold_out", ["deaf", "stopped"])
async def test_a_child_that_does_not_end_is_killed_after_the_time_given(family: Family, hold_out: str) -> None:
    child = family.spawn("hold", *(["deaf"] if hold_out == "deaf" else []), "ready", "wait")
    await child.ready()
    if hold_out == "stopped":
        os.kill(child.pid, signal.SIGSTOP)
    await family.supervisor.stop(0.1)
    # A stopped process has both signals waiting by then, and may die of either.
    assert [death.exit for death in family.deaths] in ([-signal.SIGKILL], [-signal.SIGTERM])


async def test_a_second_stop_does_not_wait(family: Family) -> None:
    child = family.spawn("hold", "deaf", "ready", "wait")
    await child.ready()
    first = asyncio.create_task(family.supervisor.stop(600))
    await asyncio.sleep(0)
    await family.supervisor.stop(600)
    await first
    assert [death.exit for death in family.deaths] == [-signal.SIGKILL]


async def test_stop_during_a_pause_before_a_restart_ends_the_waiting(family: Family) -> None:
    child = family.spawn("hold", "exit=1", restart=RestartPolicy(first_s=600))
    waiting = asyncio.create_task(child.ready())
    await until(lambda: bool(family.deaths))
    await family.supervisor.stop(PATIENCE_S)
    with pytest.raises(ZrtError, match="being stopped") as raised:
        await waiting
    assert raised.value.kind == "cancelled"


async def test_no_descriptor_is_left_open(family: Family) -> None:
    async def live_once(number: int) -> None:
        child = family.spawn("hold", "say=hello", "ready", "wait", name=f"child{number}")
        await child.ready()
        await child.stop(PATIENCE_S)
        family.supervisor.remove(child)

    await live_once(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 6):
        await live_once(number)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_child_holds_no_descriptor_of_its_siblings_or_parent(family: Family) -> None:
    """A sibling that held the other end of a death pipe would keep its reader alive."""
    children = [family.spawn("hold", "ready", "wait", name=f"child{number}") for number in range(3)]
    for child in children:
        await child.ready()
    pipes = [
        {os.readlink(entry.path) for entry in os.scandir(f"/proc/{child.pid}/fd") if "pipe:" in os.readlink(entry.path)}
        for child in children
    ]
    assert not set.intersection(*pipes)


# ---- orphans -------------------------------------------------------------------------------------


@contextmanager
def _parent(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    parent = subprocess.Popen(words(str(folder), program="parent.py"))
    try:
        yield parent
    finally:
        parent.kill()
        parent.wait()
        for pid in _pids(folder).values():
            if not _gone(pid):
                os.kill(pid, signal.SIGKILL)


def _pids(folder: Path) -> dict[str, int]:
    return {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "all"}


@pytest.mark.parametrize("victim", ["parent", "one"])
async def test_nobody_outlives_a_killed_parent(tmp_path: Path, victim: str) -> None:
    """SIGKILL to a parent: its children and theirs are gone within 5 s, deaf ones and busy ones
    too."""
    orphans = ["grandchild"] if victim == "one" else ["one", "two", "three", "grandchild"]
    with _parent(tmp_path):
        await until((tmp_path / "all").exists)
        pids = _pids(tmp_path)
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: all(_gone(pids[name]) for name in orphans))
        assert time.monotonic() - killed < 5


async def test_a_stopped_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    with _parent(tmp_path) as parent:
        await until((tmp_path / "all").exists)
        pids = [_pids(tmp_path)[name] for name in ("two", "grandchild")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        await until(lambda: all(_gone(pid) for pid in pids))


@pytest.mark.parametrize("tie", ["the death pipe", "the parent's id"])
def test_each_tie_to_the_parent_is_enough_by_itself(tie: str) -> None:
    """The pipe where pdeathsig was lost, and the check where the parent died before the child got
    that far."""
    reader, writer = os.pipe()
    env = {DEATH_FD: str(reader)} if tie == "the death pipe" else {PARENT: "1"}
    child = subprocess.Popen(words("hold", "say=held", "wait"), pass_fds=(reader,), env={**os.environ, **env})
    os.close(reader)
    if tie == "the death pipe":
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    os.close(writer)
    assert child.wait(PATIENCE_S) == 1


# ---- an actor's process --------------------------------------------------------------------------


async def test_an_actors_process_is_ready_answers_and_ends_when_told(family: Family) -> None:
    child = family.supervisor.spawn("good", words("good", program="actor.py"))
    ready = await child.ready()
    asker = Actor("a")
    await asker.start()
    with pytest.raises(ZrtError) as raised:
        await asker.ask(Address("good", ready.incarnation, ready.endpoint), Shutdown(), timeout=PATIENCE_S)
    assert raised.value.kind == "unknown_op"
    await asker.stop()
    await child.stop(PATIENCE_S)
    assert [death.exit for death in family.deaths] == [0]


async def test_an_actors_process_collects_no_garbage_among_what_it_imported(family: Family) -> None:
    await family.supervisor.spawn("great", words("great", program="actor.py")).ready()
    await until(lambda: bool(family.lines))
    (said,) = [line for _, line in family.lines]
    looks_at, whole = (int(word) for word in said.split() if word.isdigit())
    assert 0 < looks_at < 10
    assert whole > 100


async def test_an_actors_process_reports_why_it_cannot_start(family: Family) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        taken = family.supervisor.spawn("taken", words(f"taken={endpoint}", program="actor.py"), restart=QUICK)
        with pytest.raises(ZrtError, match=f"{endpoint} is taken") as raised:
            await taken.ready()
    assert raised.value.kind == "bad_config"
    bug = family.supervisor.spawn("bug", words("bug", program="actor.py"), restart=QUICK)
    with pytest.raises(ZrtError, match="ZeroDivisionError: by zero") as raised:
        await bug.ready()
    assert raised.value.kind == "internal"
    assert [death.exit for death in family.deaths] == [1, 1]


async def test_an_actor_that_does_not_stop_ends_at_the_second_signal(family: Family) -> None:
    child = family.supervisor.spawn("stubborn", words("stubborn", program="actor.py"))
    await child.ready()
    pid = child.pid
    os.kill(pid, signal.SIGTERM)
    await until(lambda: ("stubborn", "is told to stop") in family.lines)
    os.kill(pid, signal.SIGINT)
    await until(lambda: bool(family.deaths))
    assert family.deaths[0].exit == 128 + signal.SIGINT
