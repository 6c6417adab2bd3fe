"""The executor: one function at a time, in order, off the loop."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from support.peers import PATIENCE_S, Start, until
from support.stalls import EmptyLoop, StallMeter

from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.executor import LOST_DEVICE_STATUS, ComputeExecutor
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Done
from zrt.runtime.messages.members import Shutdown

STALL_MS = 50.0
ROUNDS = 3


@pytest.fixture
def executor() -> ComputeExecutor:
    return ComputeExecutor("sums")


async def test_it_returns_what_the_function_returns_from_a_thread_of_that_name(executor: ComputeExecutor) -> None:
    def work(left: int, *, right: int) -> tuple[int, str]:
        return left + right, threading.current_thread().name

    assert await executor.run(work, 1, right=2) == (3, "sums")


async def test_what_the_function_raises_reaches_the_caller_and_the_lane_goes_on(executor: ComputeExecutor) -> None:
    def fail() -> None:
        raise ZrtError("kv_full", "no page")

    def end() -> None:
        raise SystemExit(3)

    def stop_iteration() -> None:
        raise StopIteration

    with pytest.raises(ZrtError, match="no page"):
        await executor.run(fail)
    with pytest.raises(SystemExit):
        await executor.run(end)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.run(stop_iteration)
    assert await executor.run(lambda: 1) == 1


async def test_functions_run_one_at_a_time_in_order(executor: ComputeExecutor) -> None:
    running, order, overlaps = 0, [], 0

    def work(number: int) -> None:
        nonlocal running, overlaps
        running += 1
        overlaps += running > 1
        time.sleep(0.001)
        order.append(number)
        running -= 1

    await asyncio.gather(*(executor.run(work, number) for number in range(30)))
    assert order == list(range(30))
    assert overlaps == 0


async def test_a_cancelled_caller_leaves_the_running_function_to_finish_and_the_next_waits(
    executor: ComputeExecutor,
) -> None:
    started, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        started.set()
        go_on.wait(PATIENCE_S)
        done.append("slow")

    first = asyncio.create_task(executor.run(slow))
    await until(started.is_set)
    unwanted = asyncio.create_task(executor.run(done.append, "unwanted"))
    last = asyncio.create_task(executor.run(done.append, "last"))
    await asyncio.sleep(0)
    first.cancel()
    unwanted.cancel()
    await asyncio.wait([first, unwanted])
    assert done == []
    go_on.set()
    await last
    assert done == ["slow", "last"]


async def test_closing_fails_what_waits_and_lets_the_running_function_finish(executor: ComputeExecutor) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        go_on.wait(PATIENCE_S)
        return "finished"

    first = asyncio.create_task(executor.run(slow))
    await until(started.is_set)
    waiting = asyncio.create_task(executor.run(lambda: None))
    await asyncio.sleep(0)
    executor.close()
    executor.close()
    assert not await executor.ended(0.05)
    go_on.set()
    assert await first == "finished"
    with pytest.raises(ZrtError) as left_waiting:
        await waiting
    assert await executor.ended(PATIENCE_S)
    with pytest.raises(ZrtError) as too_late:
        await executor.run(lambda: None)
    assert (left_waiting.value.kind, too_late.value.kind) == ("cancelled", "cancelled")


async def test_busy_time_counts_the_function_that_runs(executor: ComputeExecutor) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go_on.wait(PATIENCE_S)

    assert executor.busy_us == 0
    running = asyncio.create_task(executor.run(slow))
    await until(started.is_set)
    first = executor.busy_us
    await until(lambda: executor.busy_us > first)
    go_on.set()
    await running
    idle = executor.busy_us
    await asyncio.sleep(0.01)
    assert executor.busy_us == idle >= first


async def _worst_beyond_empty(executor: ComputeExecutor, work: object, actor: Actor) -> float:
    """How much longer the loop was held up at worst than an empty one beside it, while the executor
    works and the actor answers itself."""
    async with EmptyLoop() as empty:
        with StallMeter() as meter:
            for _ in range(8):
                await executor.run(work)  # type: ignore[arg-type]
                await actor.ask(actor.address, Shutdown(), timeout=PATIENCE_S)
    return meter.worst_ms - empty.worst_ms


def _large_products() -> None:
    matrix = torch.rand(1200, 1200)
    for _ in range(2):
        matrix = matrix @ matrix
        matrix /= matrix.norm()


def _many_small_operations() -> None:
    row, matrix = torch.rand(1, 576), torch.rand(576, 576) / 576
    for _ in range(4000):
        row = torch.nn.functional.silu(row @ matrix) + row


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a small machine a second torch thread would take the core that the loop runs on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("work", [_large_products, _many_small_operations])
async def test_the_loop_is_not_held_up_while_the_lane_computes(
    start: Start, executor: ComputeExecutor, work: object
) -> None:
    actor = await start(Actor("a"))
    actor.handle(Shutdown, lambda body, envelope: Done())
    # The machine's own hiccups hit one process or the other, so the best of a few rounds counts: a
    # real stall is in each of them.
    beyond = []
    for _ in range(ROUNDS):
        beyond.append(await _worst_beyond_empty(executor, work, actor))
        if beyond[-1] <= STALL_MS:
            break
    assert min(beyond) <= STALL_MS, beyond


async def test_the_meter_sees_a_loop_that_is_held_up() -> None:
    async with EmptyLoop() as empty:
        with StallMeter() as meter:
            await asyncio.sleep(0.01)
            time.sleep(0.3)  # noqa: ASYNC251
    assert meter.worst_ms - empty.worst_ms > STALL_MS


async def test_what_raised_is_let_go_of_once_its_error_is(executor: ComputeExecutor) -> None:
    """Whatever a function worked with, weights and sockets: without the garbage collector, which
    may come late."""

    class Weights:
        pass

    left: list[weakref.ref[Weights]] = []

    def fail() -> None:
        weights = Weights()
        left.append(weakref.ref(weights))
        raise ZrtError("rank_failed", "a collective broke off")

    gc.disable()
    try:
        with suppress(ZrtError):
            await executor.run(fail)
        await executor.run(lambda: None)
        assert left[0]() is None
    finally:
        gc.enable()


LANE = """
import asyncio, sys
from zrt.runtime.errors import ZrtError
from zrt.runtime.actor.executor import LOST_DEVICE_STATUS, ComputeExecutor

async def run(error):
    executor = ComputeExecutor("stage0-cuda:0", lambda: False)
    try:
        await executor.run(error)
    except Exception as raised:
        print(type(raised).__name__)

def foreseen(): raise ZrtError("kv_full", "no page")
def unforeseen(): raise RuntimeError("device-side assert")
asyncio.run(run(globals()[sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("foreseen", 0, "ZrtError\n"),
        ("unforeseen", LOST_DEVICE_STATUS, ""),
    ],
)
def test_a_process_whose_device_is_lost_ends(error: str, status: int, said: str) -> None:
    words = [sys.executable, "-c", LANE, error]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (status, said), ended.stderr
    assert ("the device of stage0-cuda:0" in ended.stderr) == bool(status)
