"""The push of layers, from a master's side and a worker's."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.layer_masters import assign, offer_of, push, read, worker_at
from support.peers import until

from zrt.actors.block_server.layer_lending import layer_setup
from zrt.actors.block_server.layer_lending import offer as offer_module
from zrt.actors.block_server.layer_lending.layer_setup import UNACKNOWLEDGED
from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.actors.block_server.layer_lending.offer import CHUNK_BYTES
from zrt.runtime.actor.actor import Actor
from zrt.runtime.actor.envelope import Envelope, Reply
from zrt.runtime.messages.layers import Hello, LayerTraffic, ModelDataChunk, WorkerInfo
from zrt.runtime.models.architecture.spec import spec_from_config
from zrt.runtime.models.checkpoint.layout import block_name, block_shapes


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=6)


async def test_what_was_pushed_is_not_pushed_again(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model)
    async with worker_at(tmp_path) as peer:
        assert await assign(peer, model, offer, single=False)
        first = await push(peer, offer, files=2)
        assert "not complete" in str((await peer.ask("ModelDataDone"))["message"])
    async with worker_at(tmp_path) as peer:
        assert await assign(peer, model, offer, single=False)
        assert first + await push(peer, offer) == sum(file.size for file in offer.files)
        assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}
    async with worker_at(tmp_path) as peer:
        assert not await assign(peer, model, offer, single=False)
        assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}


async def test_a_cached_file_with_other_bytes_is_never_loaded_and_is_sent_again(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model)
    async with worker_at(tmp_path) as peer:
        assert await assign(peer, model, offer, single=False)
        await push(peer, offer)
        assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}
    damaged, torn = (tmp_path / offer.model_hash / file.name for file in offer.files[1:3])
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\xff\xff\x7f\x7f")
    torn.write_bytes(os.urandom(torn.stat().st_size))
    async with worker_at(tmp_path) as peer:
        assert not await assign(peer, model, offer, single=False)
        answer = await peer.ask("ModelDataDone")
        assert answer["type"] == "WorkerError"
        assert str(answer["message"]).startswith("worker_failed: "), answer  # its master gives the layers out again
        assert await assign(peer, model, offer, single=False)
        assert await push(peer, offer) == sum(file.size for file in offer.files[1:3])
        assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}
    assert damaged.read_bytes() == read(offer.files[1], 0)


async def test_a_master_holds_nothing_of_what_it_pushes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hollow_model(folder)
    async with worker_at(tmp_path / "cache") as peer:
        words = [str(folder), peer.worker.endpoint, str(peer.worker.incarnation)]
        master = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parents[1] / "support" / "pushing.py"),
            *words,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(master.communicate(), 60)
    said = json.loads(out)
    buffers = UNACKNOWLEDGED * CHUNK_BYTES
    assert said["pushed"] > 6 * buffers
    assert said["grew"] < 2 * buffers


async def test_four_chunks_at_most_are_on_their_way_unanswered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (offer_module, layer_setup):
        monkeypatch.setattr(module, "CHUNK_BYTES", 10_000)
    offer, master, answers = offer_of(model), Actor("master"), asyncio.Event()
    came, unanswered, most = 0, 0, 0
    async with worker_at(tmp_path) as peer:
        worker = peer.worker

        async def counted(body: Any, envelope: Envelope) -> LayerTraffic | Reply:
            nonlocal came, unanswered, most
            assert isinstance(envelope.body, ModelDataChunk)
            data = bool(envelope.body.data) and envelope.body.filename != "manifest.json"
            came, unanswered = came + data, unanswered + data
            most = max(most, unanswered)
            if data:
                await answers.wait()
            answer = await worker._on_message(envelope.body, envelope)
            unanswered -= data
            return answer

        worker.handle(ModelDataChunk, counted)
        await master.start()
        try:
            assert await assign(peer, model, offer, single=False)
            lent = LentWorker(master, worker.address)
            pushing = asyncio.create_task(layer_setup.push(lent, offer, lambda held, sent: None))
            await until(lambda: unanswered >= 4)
            for _ in range(20):  # it has time for more, and what it said before this has come
                await lent.ask(Hello(), WorkerInfo, 20)
            assert (came, unanswered) == (4, 4)
            answers.set()
            await asyncio.wait_for(pushing, 20)
        finally:
            await master.stop()
    assert came == sum(len(list(file.chunks(0))) for file in offer.files) > 40
    assert most == 4


def hollow_model(folder: Path) -> None:
    """A llama whose weights are zeros, which take no room on disk: two layers besides the ends, of
    100 MB each."""
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 1024,
        "intermediate_size": 7168,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    spec = spec_from_config(config)
    shapes = {block_name(layer, part): shape for layer in range(4) for part, shape in block_shapes(spec).items()}
    shapes |= {"model.embed_tokens.weight": (8, 1024), "model.norm.weight": (1024,)}
    table, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
