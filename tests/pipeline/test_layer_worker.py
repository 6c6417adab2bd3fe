"""A layer worker, driven by hand-made documented messages: MessagePack maps over a DEALER, nothing of zrt's on this side."""

import errno
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from chained import Pipeline

from zrt.actors.layer_worker import LayerWorker
from zrt.runtime import layer_files
from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.held_layers import runs_of
from zrt.runtime.compute.inventory import Inventory
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.errors import ZrtError
from zrt.runtime.layer_files import LayerFile, LayerStore, Offer

CONTEXT = 64
NAMES = [f"model.layers.{number}" for number in (1, 2, 3, 4)]


class Peer:
    """A master that says what it likes."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def ask(self, kind: str, **fields: object) -> dict[str, object]:
        await self._socket.send(msgspec.msgpack.encode({"type": kind, **fields}))
        assert await self._socket.poll(20_000), f"no answer to {kind}"
        answer: dict[str, object] = msgspec.msgpack.decode(await self._socket.recv())
        return answer

    async def op(self, kind: str, x: torch.Tensor, names: list[str], index_pos: int) -> torch.Tensor:
        raw = {"data": x.numpy().tobytes(), "dtype": 5, "shape": list(x.shape)}
        if kind == "SingleOp":
            fields = {"layer_name": names[0], "index_pos": index_pos, "block_idx": int(names[0].split(".")[-1])}
        else:
            fields = {"batch": [[name, index_pos, int(name.split(".")[-1])] for name in names]}
        answer = await self.ask(kind, x=raw, **fields)
        assert answer["type"] == "Tensor", answer
        return torch.frombuffer(bytearray(answer["data"]), dtype=torch.float32).view(answer["shape"])


@asynccontextmanager
async def worker_at(cache: Path) -> AsyncIterator[Peer]:
    """A worker whose coordinator is not there, and a peer of it."""
    worker = LayerWorker(
        "attic", join="tcp://127.0.0.1:1", cache=cache, device="cpu", threads=1, listen="tcp://127.0.0.1:0"
    )
    await worker.start()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(worker.endpoint)
    try:
        yield Peer(socket)
    finally:
        socket.close()
        context.term()
        await worker.stop()


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=6)


def offer_of(model: Path, layers: tuple[int, ...] = (1, 2, 3, 4)) -> Offer:
    spec = read_spec(model)
    source, spec = Inventory.open(model).matched(spec)
    return Offer([LayerFile.of(source, spec, layer) for layer in layers], (model / "config.json").read_text())


async def assign(peer: Peer, model: Path, offer: Offer, *, single: bool, kv_bytes: int = 1 << 22) -> bool:
    text = (model / "config.json").read_text()
    settings = {"dtype": "float32", "kv_bytes": kv_bytes, "context": CONTEXT, "sessions": 4, "single": single}
    assert (await peer.ask("PrepareLayers", config_json=text, **settings))["type"] == "LayersPrepared"
    answer = await peer.ask("LayerAssignment", layers=NAMES, model_hash=offer.model_hash)
    assert answer["type"] == "LayerAssignmentAck", answer
    return bool(answer["needs_data"])


async def push(peer: Peer, offer: Offer, files: int = 99) -> int:
    """Send what the worker lacks, of so many files; how many bytes those were."""
    size = len(offer.manifest)
    probe = {"filename": "manifest.json", "offset": 0, "total_size": size}
    assert (await peer.ask("ModelDataChunk", **probe, data=b""))["type"] == "ModelDataTaken"
    assert (await peer.ask("ModelDataChunk", **probe, data=offer.manifest))["held"] == size
    sent = 0
    for file in offer.files[:files]:
        fields = {"filename": file.name, "total_size": file.size}
        held = (await peer.ask("ModelDataChunk", offset=0, data=b"", **fields))["held"]
        while held < file.size:
            data = file.read(held, layer_files.PIECE_BYTES)
            answer = await peer.ask("ModelDataChunk", offset=held, data=data, **fields)
            assert answer["type"] == "ModelDataTaken", answer
            held, sent = answer["held"], sent + len(data)
    return sent


async def loaded(peer: Peer, model: Path, *, single: bool) -> None:
    offer = offer_of(model)
    if await assign(peer, model, offer, single=single):
        await push(peer, offer)
    assert await peer.ask("ModelDataDone") == {"type": "WorkerReady"}


def expected(model: Path, parts: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """What blocks 1 to 4 make of these steps of one session."""
    pipeline = Pipeline(model, [(1, 4)], torch.float32, CONTEXT, 1 << 24)
    pipeline.open("s")
    return [pipeline.stages[0].forward([Step("s", at, x.shape[1])], x[0]).unsqueeze(0) for at, x in parts]


def rows(n: int) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("kind", ["SingleOp", "Batch"])
async def test_layers_run_as_the_model_does_and_goodbye_ends_the_session(
    model: Path, tmp_path: Path, kind: str
) -> None:
    parts = [(0, rows(5)), (5, rows(1)), (6, rows(1))]
    wanted = expected(model, parts)
    async with worker_at(tmp_path) as peer:
        hello = await peer.ask("Hello")
        assert hello["type"] == "WorkerInfo"
        assert (hello["os"], hello["device"], hello["device_idx"]) == ("linux", "cpu", 0)
        await loaded(peer, model, single=kind == "SingleOp")
        for _ in range(2):
            for (at, x), want in zip(parts, wanted, strict=True):
                if kind == "Batch":
                    x = await peer.op("Batch", x, NAMES, at)
                else:
                    for name in NAMES:
                        x = await peer.op("SingleOp", x, [name], at)
                assert torch.allclose(x, want, atol=1e-5)
            goodbye = await peer.ask("Goodbye")
            assert (goodbye["type"], goodbye["dtype"]) == ("WorkerInfo", "F32")
            raw = {"data": rows(1).numpy().tobytes(), "dtype": 5, "shape": [1, 1, 64]}
            names = NAMES if kind == "Batch" else NAMES[:1]
            gap = await peer.ask("Batch", x=raw, batch=[[name, 7, int(name[-1])] for name in names])
            assert str(gap["message"]).startswith("kv_gap: ")


async def test_a_failed_op_leaves_the_kv_as_it_was(model: Path, tmp_path: Path) -> None:
    parts = [(0, rows(5)), (5, rows(1))]
    wanted = expected(model, parts)
    async with worker_at(tmp_path) as peer:
        await loaded(peer, model, single=True)
        await peer.op("Batch", parts[0][1], NAMES, 0)
        raw = {"data": rows(1).numpy().tobytes(), "dtype": 5, "shape": [1, 1, 64]}
        for batch in ([[NAMES[0], 5, 1], ["model.layers.5", 5, 5]], [[NAMES[0], 5, 1], ["lm_head", 5, 2]], []):
            assert (await peer.ask("Batch", x=raw, batch=batch))["type"] == "WorkerError"
        # the first layer is one token ahead of the others now, and a batch of all begins at its end
        await peer.op("SingleOp", rows(1), NAMES[:1], 5)
        failed = await peer.ask("Batch", x=raw, batch=[[name, 6, int(name[-1])] for name in NAMES])
        assert str(failed["message"]).startswith("kv_gap: ")
        assert torch.allclose(await peer.op("Batch", parts[1][1], NAMES, 5), wanted[1], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "Explode"}, "unknown_op"),
        ({"type": "WorkerReady"}, "unknown_op"),
        ({"type": "ModelDataDone"}, "bad_request"),
        ({"type": "LayerAssignment", "layers": ["model.layers.1"], "model_hash": ""}, "bad_request: PrepareLayers"),
        (
            {
                "type": "SingleOp",
                "layer_name": NAMES[0],
                "x": {"data": b"", "dtype": 5, "shape": [1, 0, 64]},
                "index_pos": 0,
                "block_idx": 1,
            },
            "model_not_loaded",
        ),
    ],
)
async def test_what_it_cannot_do_is_said_in_words(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    async with worker_at(tmp_path) as peer:
        kind = str(fields.pop("type"))
        answer = await peer.ask(kind, **fields)
        assert answer["type"] == "WorkerError"
        assert str(answer["message"]).startswith(said)


async def test_a_layer_that_the_model_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    text = (model / "config.json").read_text()
    settings = {"dtype": "float32", "kv_bytes": 1 << 20, "context": CONTEXT, "sessions": 4, "random": True}
    async with worker_at(tmp_path) as peer:
        await peer.ask("PrepareLayers", config_json=text, **settings)
        await peer.ask("LayerAssignment", layers=["model.layers.0", "model.layers.6"], model_hash="")
        answer = await peer.ask("ModelDataDone")
        assert answer["message"] == "bad_request: layers 6-6: this model has layers 0-5"


# ---- the push -------------------------------------------------------------------------------------------------------


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


def test_a_file_goes_on_where_its_last_whole_piece_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    offer = offer_of(model, (2,))
    (file,) = offer.files
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    for at in (0, 10_000):
        assert store.take(file.name, at, file.size, file.read(at, 10_000)) == at + 10_000
    partial = tmp_path / offer.model_hash / f"{file.name}.part"
    partial.write_bytes(partial.read_bytes()[:-1] + b"?")  # the last piece was not written whole
    again = LayerStore(tmp_path, offer.model_hash)
    held = again.take(file.name, 0, file.size, b"")
    assert held == 10_000
    while held < file.size:
        held = again.take(file.name, held, file.size, file.read(held, 10_000))
    assert LayerStore(tmp_path, offer.model_hash).complete
    (kept,) = again.files()
    assert kept.read_bytes() == file.read(0, file.size)
    assert not partial.exists()


def test_bytes_that_are_not_the_offers_are_refused(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model, (2,))
    (file,) = offer.files
    whole = file.read(0, file.size)
    store = LayerStore(tmp_path, offer.model_hash)
    refused = [
        (file.name, 0, file.size, whole),  # before the manifest
        ("manifest.json", 0, len(offer.manifest), offer.manifest[:-1] + b" "),
        ("manifest.json", 1, len(offer.manifest), offer.manifest[1:]),
    ]
    for name, at, total, data in refused:
        with pytest.raises(ZrtError, match="bad_request"):
            store.take(name, at, total, data)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    refused = [
        ("../x", 0, 1, b"x"),
        ("layer-00003.safetensors", 0, file.size, whole),
        (file.name, 0, file.size + 1, whole),
        (file.name, 8, file.size, whole[8:]),
        (file.name, 0, file.size, whole[:-1]),
        (file.name, 0, file.size, bytes(file.size)),
    ]
    for name, at, total, data in refused:
        with pytest.raises(ZrtError, match="bad_request"):
            store.take(name, at, total, data)
    assert not store.complete
    assert store.take(file.name, 0, file.size, whole) == file.size
    assert store.complete


@pytest.mark.parametrize("name", ["../layer-00001.safetensors", "/x", "manifest.json", "layer-1.safetensors", ""])
def test_a_manifest_names_files_of_layers_alone(tmp_path: Path, name: str) -> None:
    listed = {"name": name, "size": 1, "pieces": [hashlib.sha256(b"x").hexdigest()]}
    manifest = msgspec.json.encode({"config": "", "files": [listed]})
    store = LayerStore(tmp_path, hashlib.sha256(manifest).hexdigest())
    with pytest.raises(ZrtError, match="no name of a layer's file"):
        store.take("manifest.json", 0, len(manifest), manifest)


@pytest.mark.parametrize("model_hash", ["", "../x", "A" * 64, "a" * 63])
def test_a_hash_is_64_hex_digits(tmp_path: Path, model_hash: str) -> None:
    with pytest.raises(ZrtError, match="64 hex digits"):
        LayerStore(tmp_path, model_hash)


def test_consecutive_layers_are_runs() -> None:
    assert runs_of([1, 2, 3, 5, 7, 8]) == [(1, 3), (5, 5), (7, 8)]


def test_files_that_another_offer_brought_are_taken_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    first, second = offer_of(model, (1, 2)), offer_of(model, (1, 2, 3))
    store = LayerStore(tmp_path, first.model_hash)
    store.take("manifest.json", 0, len(first.manifest), first.manifest)
    whole, half = first.files
    for at in range(0, whole.size, 10_000):
        store.take(whole.name, at, whole.size, whole.read(at, 10_000))
    store.take(half.name, 0, half.size, half.read(0, 10_000))
    again = LayerStore(tmp_path, second.model_hash)
    again.take("manifest.json", 0, len(second.manifest), second.manifest)
    held = [again.take(file.name, 0, file.size, b"") for file in second.files]
    assert held == [whole.size, 10_000, 0]
    kept = tmp_path / second.model_hash / whole.name
    assert kept.samefile(tmp_path / first.model_hash / whole.name)


def test_half_a_file_is_never_a_whole_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    offer = offer_of(model, (2,))
    (file,) = offer.files
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    real, full = os.fsync, {"at": 2}

    def fsync(descriptor: int) -> None:
        full["at"] -= 1
        if full["at"] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(layer_files.os, "fsync", fsync)
        for at in (0, 10_000):
            store.take(file.name, at, file.size, file.read(at, 10_000))
        with pytest.raises(ZrtError, match="No space left") as raised:
            store.take(file.name, 20_000, file.size, file.read(20_000, 10_000))
    assert raised.value.kind == "insufficient_memory"
    assert not store.complete
    with pytest.raises(ZrtError, match="not complete"):
        store.files()
    again = LayerStore(tmp_path, offer.model_hash)
    held = again.take(file.name, 0, file.size, b"")
    assert held in (20_000, 30_000)  # the third piece was written, though not known to be on the disk
    while held < file.size:
        held = again.take(file.name, held, file.size, file.read(held, 10_000))
    assert again.files()[0].read_bytes() == file.read(0, file.size)
