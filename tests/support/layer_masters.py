"""A layer worker's master that says whatever a test likes, and offers of layers: the documented
messages by hand, without zrt's own master."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio

from zrt.actors.block_server.layer_lending.offer import LayerFile, Offer
from zrt.actors.layer_worker.layer_worker import LayerWorker
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.index import CheckpointIndex
from zrt.runtime.models.checkpoint.layer_manifest import PIECE_BYTES

CONTEXT = 64
NAMES = [f"model.layers.{number}" for number in (1, 2, 3, 4)]


class Peer:
    """A master that says whatever a test likes."""

    def __init__(self, socket: zmq.asyncio.Socket, worker: LayerWorker) -> None:
        self._socket = socket
        self.worker = worker

    async def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        await self._socket.send(msgspec.msgpack.encode({"type": kind, **fields}))
        assert await self._socket.poll(20_000), f"no answer to {kind}"
        answer: dict[str, Any] = msgspec.msgpack.decode(await self._socket.recv())
        return answer

    async def op(self, kind: str, x: torch.Tensor, names: list[str], index_pos: int) -> torch.Tensor:
        raw = {"data": x.numpy().tobytes(), "dtype": 5, "shape": list(x.shape)}
        if kind == "SingleOp":
            fields = {"layer_name": names[0], "index_pos": index_pos, "block_idx": int(names[0].split(".")[-1])}
        else:
            fields = {"batch": [[name, index_pos, int(name.split(".")[-1])] for name in names]}
        answer = await self.ask(kind, x=raw, **fields)
        assert answer["type"] == "Tensor", answer
        output: torch.Tensor = torch.frombuffer(bytearray(answer["data"]), dtype=torch.float32)
        return output.view(answer["shape"])


@asynccontextmanager
async def worker_at(cache: Path) -> AsyncIterator[Peer]:
    """Run a worker whose coordinator is not there, and a peer of that worker."""
    worker = LayerWorker(
        "attic", join="tcp://127.0.0.1:1", cache=cache, device="cpu", threads=1, listen="tcp://127.0.0.1:0"
    )
    await worker.start()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(worker.endpoint)
    try:
        yield Peer(socket, worker)
    finally:
        socket.close()
        context.term()
        await worker.stop()


def offer_of(model: Path, layers: tuple[int, ...] = (1, 2, 3, 4)) -> Offer:
    spec = read_spec(model)
    source, spec = CheckpointIndex.open(model).matched(spec)
    return Offer([LayerFile.of(source, spec, layer) for layer in layers], (model / "config.json").read_text())


def read(file: LayerFile, at: int, size: int = PIECE_BYTES) -> bytes:
    """Return `size` bytes of a file from `at` on, or as many as there are."""
    data = bytearray(min(size, file.size - at))
    file.read(at, memoryview(data))
    return bytes(data)


async def assign(peer: Peer, model: Path, offer: Offer, *, single: bool, kv_bytes: int = 1 << 22) -> bool:
    text = (model / "config.json").read_text()
    settings = {"dtype": "float32", "kv_bytes": kv_bytes, "context": CONTEXT, "sessions": 4, "single": single}
    assert (await peer.ask("PrepareLayers", config_json=text, **settings))["type"] == "LayersPrepared"
    answer = await peer.ask("LayerAssignment", layers=NAMES, model_hash=offer.model_hash)
    assert answer["type"] == "LayerAssignmentAck", answer
    return bool(answer["needs_data"])


async def push(peer: Peer, offer: Offer, files: int = 99) -> int:
    """Send the bytes that the worker lacks of the first `files` files; return how many those
    were."""
    size = len(offer.manifest)
    probe = {"filename": "manifest.json", "offset": 0, "total_size": size}
    assert (await peer.ask("ModelDataChunk", **probe, data=b""))["type"] == "ModelDataTaken"
    assert (await peer.ask("ModelDataChunk", **probe, data=offer.manifest))["held"] == size
    sent = 0
    for file in offer.files[:files]:
        fields = {"filename": file.name, "total_size": file.size}
        held = (await peer.ask("ModelDataChunk", offset=0, data=b"", **fields))["held"]
        while held < file.size:
            data = read(file, held)
            answer = await peer.ask("ModelDataChunk", offset=held, data=data, **fields)
            assert answer["type"] == "ModelDataTaken", answer
            held, sent = answer["held"], sent + len(data)
    return sent


async def loaded(peer: Peer, model: Path, *, single: bool) -> None:
    offer = offer_of(model)
    if await assign(peer, model, offer, single=single):
        await push(peer, offer)
    assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}
