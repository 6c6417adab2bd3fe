"""The scripted client: generations, status and control of a running cluster, from any asyncio
program.

async with Client() as zrt:
    async for piece in zrt.generate("Why is the sky blue?", max_tokens=64, temperature=0.0):
        print(piece.text, end="")
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Unpack

import msgspec

from zrt.runtime.client.connection import Connection, Events
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import (
    Cancel,
    Changes,
    ClientEvent,
    ClientRequest,
    Cluster,
    Down,
    Drain,
    Drained,
    Finished,
    Follow,
    Generate,
    Ok,
    Piece,
    Progress,
    Restart,
    Status,
    Subscribe,
    Undrain,
    Unsubscribe,
)
from zrt.runtime.messages.prompt import ChatMessage, TemplateOptions, TemplateValue
from zrt.runtime.messages.sampling import SamplingKeywords, sampling_fields
from zrt.runtime.process import runfiles
from zrt.runtime.wire.cluster_changes import Snapshots

DRAIN_S: Final = 30.0
"""How long sessions may go on at a block server that is being drained."""
FOLLOW_S: Final = 60.0
"""How long a followed session may be silent before the cluster counts as lost."""
LEAVE_S: Final = 5.0
"""How long sessions may go on in a cluster that goes down."""
DOWN_S: Final = 20.0
"""How long a cluster may take to go down: its processes get some seconds to end in good order, and
are then killed."""


def find_endpoint(endpoint: str | None) -> str:
    """Return the given endpoint, $ZRT_ENDPOINT, or that of the last cluster started on this
    machine. ZrtError coordinator_lost: there is none of these; bad_config: the first of them that
    is there is empty, which does not mean the next one."""
    given = {"the endpoint": endpoint, "ZRT_ENDPOINT": os.environ.get("ZRT_ENDPOINT")}
    for name, found in given.items():
        if found is None:
            continue
        if not found:
            text = f"{name} is empty: give a cluster's, or leave it out (unset it) where the last one started here is meant"
            raise ZrtError("bad_config", text)
        return found
    found = runfiles.last_endpoint()
    if found is None:
        raise ZrtError(
            "coordinator_lost",
            "no cluster runs here: `zrt up` starts one, which is found a moment later; --connect ENDPOINT names another",
        )
    return found


def _template_options(given: Mapping[str, TemplateValue]) -> dict[str, TemplateValue]:
    """Return options that can be sent. ZrtError bad_request, in the coordinator's words."""
    try:
        return msgspec.convert(dict(given), TemplateOptions)
    except msgspec.ValidationError as error:
        raise ZrtError("bad_request", f"generate.template_options: {error}") from None


class Client(Connection):
    """A connection to a cluster's coordinator; use it as an async context manager. ZrtError
    coordinator_lost when no coordinator answers.

    Many requests may be open at once. Everything runs on the loop that entered the context. When
    the connection breaks it is made again, and generations go on where they were, no token lost or
    repeated. Generations end with resume_expired if the connection was gone for longer than the
    cluster keeps them, with coordinator_lost if their coordinator died or cannot be reached for a
    while after that.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(find_endpoint(endpoint))

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        raw: bool = False,
        system: str | None = None,
        template_options: Mapping[str, TemplateValue] | None = None,
        special_as_text: bool = False,
        room: int = 0,
        **options: Unpack[SamplingKeywords],
    ) -> Stream:
        """Start a generation; iterate over the result for its pieces. messages/prompt.py
        (PromptRequest) describes the prompt, messages/sampling.py (SamplingRequest) the options.
        `system` is a system prompt, the first message before `prompt` or `messages`.

        With `n` > 1 the answers' pieces come mixed; `choice` tells them apart. ZrtError
        bad_request: a value is out of range, or `system` goes with no chat. TypeError: there is no
        such option.
        """
        if system:
            if raw or token_ids is not None or (prompt is None) == (messages is None):
                raise ZrtError("bad_request", "system goes with prompt or messages, not with raw or token_ids")
            asked = [{"role": "user", "content": prompt}] if prompt is not None else messages or ()
            prompt, messages = None, [{"role": "system", "content": system}, *asked]
        chat = None
        if messages is not None:
            chat = [ChatMessage(role=message["role"], content=message["content"]) for message in messages]
        request = Generate(
            id=self.next_id(),
            prompt=prompt,
            messages=chat,
            token_ids=None if token_ids is None else list(token_ids),
            raw=raw,
            template_options=_template_options(template_options or {}),
            special_as_text=special_as_text,
            room=room,
            **sampling_fields(options),
        )
        return Stream(self, request)

    async def status(self) -> Cluster:
        """Return the cluster as it is now."""
        request = Status(id=self.next_id())
        event = await self._ask(request, again=lambda: [request])
        if not isinstance(event, Cluster):
            raise ZrtError("internal", f"status was answered by {type(event).__name__}")
        return event

    async def watch(self, every: float = 1.0) -> AsyncGenerator[Cluster]:
        """Yield the cluster now, after every change and every `every` seconds, until the iteration
        is left; a connection that breaks is made again.

        The coordinator sends changes, from which whole snapshots are made: processes and sessions
        that did not change are the same objects as before. `happened` holds what is new. ZrtError
        bad_request: the changes received do not apply.
        """
        request = Subscribe(id=self.next_id(), every_ms=round(every * 1000))
        await self.there()
        snapshots, asked = Snapshots(), False
        with Events(self, request.id, again=lambda: [request]) as events:
            self.send(request)
            try:
                while True:
                    event = await events.next()
                    if isinstance(event, Cluster | Changes):
                        cluster = snapshots.take(event)
                        if cluster is not None:
                            asked = False
                            yield cluster
                        elif not asked:
                            asked = True
                            self.send(request)  # something is missing: subscribe anew, beginning with a whole snapshot
            finally:
                with suppress(ZrtError):  # without a connection there is no subscription either
                    self.send(Unsubscribe(id=request.id))

    async def follow(self, session: int) -> AsyncGenerator[Piece | Progress | Finished]:
        """Yield the events of a session, whoever started it: a piece with all its text so far, then
        all that follows. ZrtError unknown_session; the session's own error."""
        request = Follow(id=self.next_id(), session=session)
        await self.there()
        with Events(self, request.id) as events:
            events.patience = FOLLOW_S
            self.send(request)
            try:
                while True:
                    event = await events.next()
                    if isinstance(event, Piece | Progress | Finished):
                        yield event
                    if isinstance(event, Finished):
                        return
            finally:
                with suppress(ZrtError):
                    self.send(Unsubscribe(id=request.id))

    async def restart(self, name: str) -> None:
        """Have `zrt up` kill a block server and start it again. ZrtError as for `Restart` in
        messages/client.py."""
        await self._ask(Restart(id=self.next_id(), name=name))

    async def cancel(self, session: int) -> None:
        """End a session, whoever started it. ZrtError unknown_session."""
        await self._ask(Cancel(id=self.next_id(), session=session))

    async def drain(
        self, name: str, timeout: float = DRAIN_S, *, progress: Callable[[Drained], None] | None = None
    ) -> Drained:
        """Take a block server out of service: its sessions move to another replica, or may go on
        for `timeout` seconds and are then parked.

        Returns what became of the sessions once none runs there; `progress` is called with each
        intermediate state. The block server keeps its weights until `undrain`. ZrtError as for
        `Drain` in messages/client.py.
        """
        request = Drain(id=self.next_id(), name=name, timeout_ms=round(timeout * 1000))
        with Events(self, request.id) as events:
            self.send(request)
            while True:
                event = await events.next()
                if not isinstance(event, Drained):
                    raise ZrtError("internal", f"a drain was answered by {type(event).__name__}")
                if event.state == "drained":
                    return event
                if progress is not None:
                    progress(event)

    async def undrain(self, name: str) -> None:
        """Let a draining or drained block server serve again; if it lost a part of its weights
        meanwhile, once it has loaded that.

        ZrtError bad_request: there is no block server of this name, or it is neither draining nor
        drained.
        """
        await self._ask(Undrain(id=self.next_id(), name=name))

    async def down(self, timeout: float = LEAVE_S) -> None:
        """Bring the cluster down, `timeout` seconds from now if sessions run for so long. Returns
        when its coordinator, the last process to end, is gone.

        A second call, by any client, does not wait for sessions. ZrtError deadline: the coordinator
        is still there DOWN_S later.
        """
        await self._ask(Down(id=self.next_id(), timeout_ms=round(timeout * 1000)))
        try:
            async with asyncio.timeout(timeout + DOWN_S):
                await self._down.wait()
        except TimeoutError:
            text = f"the cluster at {self.endpoint} was told to end {timeout + DOWN_S:g} s ago and is still there"
            raise ZrtError("deadline", text) from None
        self._end(self.broken())

    async def _ask(
        self, request: ClientRequest, *, again: Callable[[], Sequence[ClientRequest]] | None = None
    ) -> ClientEvent:
        await self.there()
        with Events(self, request.id, again=again) as events:
            self.send(request)
            event = await events.next()
            if isinstance(event, Ok | Cluster):
                return event
            raise ZrtError("internal", f"{type(request).__name__} was answered by {type(event).__name__}")
