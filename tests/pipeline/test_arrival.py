"""From a request's arrival to its acceptance: it exists, can be given up, and waits for no longer
text than its own."""

import asyncio
import select
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import zmq.asyncio
from support.clusters import Local, local_cluster
from support.peers import until

from zrt.actors.coordinator.prompts import encoder, encoding_child, encoding_main
from zrt.actors.coordinator.prompts.encoding_main import LENGTH_BYTES
from zrt.runtime.cli.answer import Answer
from zrt.runtime.cli.commands import chat
from zrt.runtime.client.client import Client
from zrt.runtime.client.conversation import Conversation
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Finished, Progress
from zrt.runtime.messages.cluster import SessionInfo
from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.text.prompts import encode_prompt
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import BESIDE, TOKENIZER, TokenizerFiles

WAIT_S = 30.0
CONTEXT = 16384
LONG = "he had no bad " * 2000
"""A text that a process of its own tokenises, and that is beyond the context."""
FITTING = "he had no " * 500
SHORT = "he had"


@pytest_asyncio.fixture
async def cluster(speaking: Callable[..., Path]) -> AsyncIterator[Local]:
    """One stage of a model that never ends an answer by itself."""
    folder = speaking("byte-level", max_position_embeddings=CONTEXT)
    async with local_cluster(folder, [None], model_context=CONTEXT, limits_lease_s=2.0) as local:
        yield local


def ask(client: Client, text: str = SHORT, **options: Any) -> Stream:
    return client.generate(text, raw=True, ignore_eos=True, **{"max_tokens": 4000, **options})


def read_files(folder: Path) -> TokenizerFiles:
    files = TokenizerFiles.read(folder)
    assert files is not None
    return files


async def started_child() -> psutil.Process:
    """Return the process that tokenises, once there is one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if any("encoding_main" in word for word in child.cmdline()):
                        return child
            await asyncio.sleep(0.005)


async def held(cluster: Local) -> tuple[psutil.Process, Stream]:
    """Return a process that tokenises and is stopped, and a request whose text it has."""
    stream = ask(cluster.client, LONG)
    events = asyncio.create_task(stream.next_event())
    child = await started_child()
    child.send_signal(signal.SIGSTOP)
    event = await events
    assert isinstance(event, Progress)
    assert event.phase == "tokenising"
    return child, stream


async def tokenising(cluster: Local) -> list[SessionInfo]:
    return [one for one in (await cluster.client.status()).sessions if one.state == "tokenising"]


async def end_of(stream: Stream) -> Finished:
    async with asyncio.timeout(WAIT_S):
        async for _ in stream:
            pass
    return stream.finished


@pytest.mark.parametrize("after_ms", [0, 1, 3, 20])
async def test_requests_given_up_at_once_come_to_nothing(cluster: Local, after_ms: int) -> None:
    """However soon, whatever has become of them by then."""

    async def leave() -> None:
        async with aclosing(ask(cluster.client, FITTING[:7000])) as stream:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_ms / 1000):
                    await stream.next_event()

    await asyncio.gather(*(leave() for _ in range(20)))
    async with asyncio.timeout(WAIT_S):
        await cluster.settled()
    assert (await cluster.client.status()).tokens < 20 * 100


@pytest.mark.parametrize("text", [SHORT, FITTING], ids=["short", "long"])
async def test_a_cancel_before_the_first_event_ends_the_generation(cluster: Local, text: str) -> None:
    unsent = ask(cluster.client, text, n=2)
    unsent.cancel()
    assert (await end_of(unsent)).reason == "cancelled"
    assert unsent.over
    sent = ask(cluster.client, text)
    first = asyncio.create_task(sent.next_event())
    await asyncio.sleep(0)
    sent.cancel()
    await first
    finished = await end_of(sent)
    assert finished.reason == "cancelled"
    assert finished.completion_tokens < 100
    await cluster.settled()


async def test_a_stream_closed_while_its_connection_is_awaited_sends_nothing(cluster: Local) -> None:
    cluster.client._up.clear()
    stream = ask(cluster.client)
    first = asyncio.create_task(stream.next_event())
    await asyncio.sleep(0)
    await stream.aclose()
    cluster.client._up.set()
    with pytest.raises(ZrtError, match="closed before it was sent"):
        await first
    assert not (await cluster.client.status()).sessions


async def test_a_request_is_there_from_its_arrival(cluster: Local) -> None:
    """It is listed, followed, ended by its number or by its request, while its text is still
    text."""
    child, stream = await held(cluster)
    (shown,) = await tokenising(cluster)
    assert (shown.prompt_tokens, shown.completion_tokens, shown.route) == (0, 0, [])
    async with aclosing(cluster.client.follow(shown.session)) as follower:
        heard = asyncio.create_task(anext(follower))
        await heard
        async with Client(cluster.coordinator.endpoint) as other:
            await other.cancel(shown.session)
        assert (await end_of(stream)).reason == "cancelled"
    assert not await tokenising(cluster)
    await until(lambda: not child.is_running())
    child, stream = await held(cluster)
    stream.cancel()
    assert (await end_of(stream)).reason == "cancelled"
    await until(lambda: not child.is_running())


async def test_a_request_that_is_not_accepted_ends_with_its_client(cluster: Local) -> None:
    async with Client(cluster.coordinator.endpoint) as client:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(cluster.coordinator.endpoint)
        await socket.send(msgspec.msgpack.encode({"type": "generate", "id": "1", "prompt": LONG, "raw": True}))
        child = await started_child()
        child.send_signal(signal.SIGSTOP)
        await socket.recv()
        assert len(await tokenising(cluster)) == 1
        socket.close()
        async with asyncio.timeout(WAIT_S), aclosing(client.watch(every=0.1)) as watch:
            async for seen in watch:
                if not seen.sessions:
                    break
    await until(lambda: not child.is_running())


async def test_each_answer_of_a_request_ends_by_itself_and_the_last_one_ends_the_text(cluster: Local) -> None:
    stream = ask(cluster.client, LONG, n=3)
    first = asyncio.create_task(stream.next_event())
    child = await started_child()
    child.send_signal(signal.SIGSTOP)
    await first
    sessions = [one.session for one in await tokenising(cluster)]
    assert len(sessions) == 3
    for session in sessions[:2]:
        await cluster.client.cancel(session)
    assert child.is_running()
    assert [one.session for one in await tokenising(cluster)] == sessions[2:]
    await cluster.client.cancel(sessions[2])
    await end_of(stream)
    await until(lambda: not child.is_running())


async def test_short_texts_do_not_wait_for_long_ones(cluster: Local) -> None:
    """A text that never comes to its end holds its own lane, and no other."""
    child, stream = await held(cluster)
    behind = ask(cluster.client, LONG)
    async with asyncio.timeout(WAIT_S):
        event = await behind.next_event()
        assert isinstance(event, Progress)
        assert (event.phase, event.message) == ("tokenising", "behind 1 text")
        for text in (SHORT, "he had " * 300, FITTING):
            assert (await end_of(ask(cluster.client, text, max_tokens=2))).reason == "length"
    assert len(await tokenising(cluster)) == 2
    child.send_signal(signal.SIGCONT)
    for each in (stream, behind):
        with pytest.raises(ZrtError, match="the context holds"):
            await end_of(each)


async def test_what_waits_is_bounded_lane_by_lane(cluster: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "BYTES", 3 * len(LONG) + 1000)
    child, stream = await held(cluster)
    others = [ask(cluster.client, LONG) for _ in range(2)]
    for one in others:
        assert isinstance(await one.next_event(), Progress)
    for lane in ("bytes", "sessions"):
        if lane == "sessions":
            monkeypatch.setattr(encoder, "BYTES", 100 * len(LONG))
            monkeypatch.setattr(encoder, "SESSIONS", 3)
        with pytest.raises(ZrtError, match=r"retry after \d+ s") as raised:
            await end_of(ask(cluster.client, LONG))
        assert raised.value.kind == "overloaded"
        assert (await end_of(ask(cluster.client, max_tokens=2))).reason == "length"
    for one in (stream, *others):
        await one.aclose()
    await until(lambda: not child.is_running())
    assert not (await cluster.client.status()).sessions


async def test_a_process_that_dies_fails_the_text_that_it_had_alone(cluster: Local) -> None:
    child, stream = await held(cluster)
    child.kill()
    with pytest.raises(ZrtError, match="was ended by signal 9") as raised:
        await end_of(stream)
    assert raised.value.kind == "internal"
    with pytest.raises(ZrtError, match="the context holds") as raised:
        await end_of(ask(cluster.client, LONG))


@pytest.mark.parametrize("grace", ["START_S", "GRACE_S"])
async def test_a_process_that_hangs_is_ended(cluster: Local, monkeypatch: pytest.MonkeyPatch, grace: str) -> None:
    """While it starts, or long after: then it need not be given the time of a start."""
    if grace == "GRACE_S":
        with pytest.raises(ZrtError, match="the context holds"):
            await end_of(ask(cluster.client, LONG))
    monkeypatch.setattr(encoding_child, grace, 1.0)
    child, stream = await held(cluster)
    with pytest.raises(ZrtError, match="in time") as raised:
        await end_of(stream)
    assert raised.value.kind == "deadline"
    assert not child.is_running()


async def test_no_process_is_left_behind(speaking: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_child, "IDLE_S", 0.2)
    folder = speaking("byte-level", max_position_embeddings=CONTEXT)
    async with local_cluster(folder, [None], model_context=CONTEXT) as local:
        with pytest.raises(ZrtError, match="the context holds"):
            await end_of(ask(local.client, LONG))
        idle = await started_child()
        await until(lambda: not idle.is_running())
        child, _ = await held(local)
    assert not child.is_running()


async def test_a_text_has_the_same_ids_whoever_tokenises_it(
    speaking: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = speaking("byte-level", max_position_embeddings=CONTEXT)
    files = read_files(folder)
    tokenizer = Tokenizer.of(files)
    request = PromptRequest(id="1", prompt=FITTING, raw=True)
    literal = PromptRequest(id="2", prompt="he</s>", raw=True, special_as_text=True)
    for longest in (1 << 20, 1):
        monkeypatch.setattr(encoder, "THREAD_LANES", (longest, longest))
        made = encoder.PromptEncoder(tokenizer, files, CONTEXT)
        ids = await made.offer(request, 1).encode()
        literal_ids = await made.offer(literal, 1).encode()
        await made.close()
        assert ids.tolist() == tokenizer.encode_raw(FITTING)
        assert "_literal" not in vars(tokenizer)  # no thread of ours had to wait for it to be made
    assert literal_ids.tolist() == tokenizer.encode_raw("he</s>", special_as_text=True)


def removed(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def changed(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"he", b"eh").replace(b"<s>", b"<z>"))


@pytest.mark.parametrize("change", [removed, cut_short, changed])
async def test_files_that_change_after_the_start_change_no_ids(
    speaking: Callable[..., Path], capfd: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    """Every file of a tokenizer is changed, and texts of every lane are asked for."""
    folder = speaking("byte-level", max_position_embeddings=CONTEXT)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<s>the {{ m.content }}</s>{% endfor %}")
    (folder / "special_tokens_map.json").write_text('{"mask_token": "he had"}')
    files = read_files(folder)
    assert set(files.contents) == {TOKENIZER, *BESIDE}
    made = encoder.PromptEncoder(Tokenizer.of(files), files, CONTEXT)
    reference = Tokenizer.open(folder)
    assert reference is not None
    for name in files.contents:
        change(folder / name)
    for count in (1, 300, 3000):
        request = PromptRequest(id="1", prompt="he had no " * count)
        ids = await made.offer(request, 1).encode()
        assert ids.tolist() == encode_prompt(reference, request)
    await made.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("sent", ["head", "message", "reply"])
def test_a_parent_that_is_gone_is_the_end_of_its_process(speaking: Callable[..., Path], sent: str) -> None:
    """Within the head of a message, within a message, or with a reply that it has not read, which
    resets the connection."""
    ours, theirs = socket.socketpair()
    files = msgspec.msgpack.encode(read_files(speaking("byte-level")))
    request = msgspec.msgpack.encode(PromptRequest(id="1", prompt=SHORT, raw=True))
    messages = b"".join(len(each).to_bytes(LENGTH_BYTES) + each for each in (files, request))
    left_out = {"head": len(request) + 1, "message": 1, "reply": 0}[sent]
    with theirs, ThreadPoolExecutor(1) as thread:
        served = thread.submit(encoding_main.serve, theirs, CONTEXT)
        with ours:
            ours.sendall(messages[: len(messages) - left_out])
            if sent == "reply":
                assert select.select([ours], [], [], WAIT_S)[0]
        served.result(WAIT_S)


async def test_a_ctrl_c_before_a_line_of_a_chat_is_sent_ends_that_answer_alone(cluster: Local) -> None:
    conversation, answer = Conversation(), Answer()
    conversation.ask(SHORT)
    options = {"max_tokens": 4000, "ignore_eos": True}
    try:
        await chat._reply(cluster.client, conversation, options, answer, early=[signal.SIGINT])
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    assert not answer.token_ids
    assert not (await cluster.client.status()).sessions
