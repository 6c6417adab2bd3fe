"""How long a client waits for its next token after a kill, with a replica ready, beside a new
prompt of the same length: the demo model, real processes."""

import asyncio
import random
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.results import tell
from support.running import Running, running

from zrt.runtime.client.client import Client
from zrt.runtime.messages.client import Piece, Progress

HISTORY = 200
MOST = 5
"""How many times what a new prompt of this length takes to its first token."""

pytestmark = [pytest.mark.chaos, pytest.mark.demo]


async def first_token(client: Client, prompt: list[int]) -> float:
    """The seconds to the first token of a prompt that no replica has seen."""
    began = time.monotonic()
    async with aclosing(client.generate(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)) as stream:
        await anext(stream)
        return time.monotonic() - began


async def next_token(client: Client, cluster: Running, stage: int, prompt: list[int]) -> tuple[list[int], float]:
    """The ids of an answer whose replica of `stage` is killed, and the seconds from the kill to the
    first token of its replay."""
    ids: list[int] = []
    killed, seconds, replays = 0.0, 0.0, False
    stream = client.generate(token_ids=prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
    while not stream.over:
        event = await stream.next_event()
        if isinstance(event, Progress):
            replays |= event.phase == "replaying"
        elif isinstance(event, Piece):
            ids += event.token_ids
            if replays and not seconds:
                seconds = time.monotonic() - killed
            if not killed:
                (session,) = (await client.status()).sessions
                victim = cluster.children()[session.route[stage]]
                killed = time.monotonic()
                victim.kill()
    return ids, seconds


def test_the_next_token_comes_soon_after_a_kill(demo_model: Path, tmp_path: Path) -> None:
    """A replica is ready, the history has 200 tokens, and each of two stages is killed. The prompts
    differ, so no replica has seen them."""
    conf = tmp_path / "cluster.toml"
    conf.write_text(cluster_file(demo_model, [None] * 2, replicas=2, threads=2, model_context=512, kv_bytes="128MiB"))

    async def all_answers(cluster: Running) -> None:
        async with Client(cluster.endpoint) as client:
            for stage in range(2):
                async with aclosing(client.watch()) as watch:
                    async for seen in watch:
                        if sum(info.state == "ready" for info in seen.actors if info.kind == "block_server") == 4:
                            break
                draw = random.Random(stage)
                new = await first_token(client, draw.choices(range(100, 40000), k=HISTORY))
                prompt = draw.choices(range(100, 40000), k=HISTORY)
                ids, seconds = await next_token(client, cluster, stage, prompt)
                tell(
                    fault="SIGKILL",
                    stage=stage,
                    way="replica",
                    history=HISTORY,
                    model="demo",
                    recovery_s=seconds,
                    new_prompt_s=new,
                )
                assert 0 < seconds < MOST * new
                async with aclosing(
                    client.generate(token_ids=prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
                ) as again:
                    assert ids == [token async for piece in again for token in piece.token_ids]

    with running(str(conf), home=tmp_path) as cluster:
        asyncio.run(all_answers(cluster))
