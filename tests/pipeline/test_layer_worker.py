"""A layer worker, driven by hand-made documented messages: MessagePack maps over a DEALER, nothing of zrt's on this side."""

import asyncio
import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from chained import Pipeline

from zrt.actors.layer_push import UNACKNOWLEDGED
from zrt.actors.layer_worker import LayerWorker
from zrt.runtime import layer_files
from zrt.runtime.compute.batch import Step
from zrt.runtime.compute.held_layers import runs_of
from zrt.runtime.compute.inventory import Inventory
from zrt.runtime.compute.layout import block_name, block_shapes
from zrt.runtime.compute.spec import read_spec, spec_from_config
from zrt.runtime.errors import ZrtError
from zrt.runtime.layer_files import LayerFile, LayerStore, Offer

CONTEXT = 64
NAMES = [f"model.layers.{number}" for number in (1, 2, 3, 4)]


class Peer:
    """A master that says what it likes."""

    def __init__(self, socket: zmq.asyncio.Socket, worker: LayerWorker) -> None:
        self._socket = socket
        self.worker = worker

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
        yield Peer(socket, worker)
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


def read(file: LayerFile, at: int, size: int = layer_files.PIECE_BYTES) -> bytes:
    """Bytes of a file from `at` on, `size` of them or what there is."""
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


async def test_a_program_that_knows_the_documented_messages_alone_drives_it(model: Path, tmp_path: Path) -> None:
    async with worker_at(tmp_path) as peer:
        program = Path(__file__).parents[1] / "layer_peer.py"
        words = (str(program), peer.worker.endpoint, str(model), str(CONTEXT))
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=subprocess.PIPE)
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        assert process.returncode == 0
        told = json.loads(out)
    assert told["zrt"] == []
    assert told["needs_data"]
    assert told["said"] == {
        "Hello": "WorkerInfo",
        "PrepareLayers": "LayersPrepared",
        "LayerAssignment": "LayerAssignmentAck",
        "ModelDataChunk": "ModelDataTaken",
        "ModelDataDone": "WorkerReady",
        "Batch": "Tensor",
        "SingleOp": "Tensor",
        "Goodbye": "WorkerInfo",
    }
    assert (told["info"]["os"], told["goodbye"]) == ("linux", "F32")
    prompt = torch.tensor(told["prompt"]).view(1, 5, 64)
    first, second = expected(model, [(0, prompt), (5, prompt[:, :1])])
    assert torch.allclose(torch.tensor(told["batch"]), first.flatten(), atol=1e-5)
    assert torch.allclose(torch.tensor(told["single"]), second.flatten(), atol=1e-5)
    assert told["gap"].startswith("kv_gap: ")


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
        assert store.take(file.name, at, file.size, read(file, at, 10_000)) == at + 10_000
    partial = tmp_path / offer.model_hash / f"{file.name}.part"
    partial.write_bytes(partial.read_bytes()[:-1] + b"?")  # the last piece was not written whole
    again = LayerStore(tmp_path, offer.model_hash)
    held = again.take(file.name, 0, file.size, b"")
    assert held == 10_000
    while held < file.size:
        held = again.take(file.name, held, file.size, read(file, held, 10_000))
    assert again.complete
    assert LayerStore(tmp_path, offer.model_hash).complete
    (kept,) = again.files()
    assert kept.read_bytes() == read(file, 0)
    assert not partial.exists()


def test_a_piece_comes_in_chunks_and_either_side_hashes_each_byte_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, sha256 = [], hashlib.sha256

    class Counted:
        def __init__(self, data: bytes | memoryview = b"") -> None:
            self._hash = sha256(data)
            hashed.append(len(data))

        def update(self, data: bytes | memoryview) -> None:
            self._hash.update(data)
            hashed.append(len(data))

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(layer_files, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(layer_files.hashlib, "sha256", Counted)
    config = len((model / "config.json").read_bytes())
    offer = offer_of(model, (2, 3))
    size = sum(file.size for file in offer.files)
    assert sum(hashed) == size + config + len(offer.manifest)
    hashed.clear()
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    for file in offer.files:
        held = store.take(file.name, 0, file.size, b"")
        for offset, count in file.chunks(held):
            assert offset == held
            held = store.take(file.name, offset, file.size, read(file, offset, count))
    assert store.complete
    assert sum(hashed) == size + len(offer.manifest)
    hashed.clear()
    assert LayerStore(tmp_path, offer.model_hash).complete
    assert sum(hashed) == len(offer.manifest)


def test_a_piece_that_is_not_the_manifests_is_taken_again_from_its_beginning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    offer = offer_of(model, (2,))
    (file,) = offer.files
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    store.take(file.name, 0, file.size, read(file, 0, 10_000))
    assert store.take(file.name, 10_000, file.size, bytes(4_000)) == 14_000
    with pytest.raises(ZrtError, match="from 10000 to 20000 are not those of the manifest"):
        store.take(file.name, 14_000, file.size, read(file, 14_000, 6_000))
    held = store.take(file.name, 0, file.size, b"")
    assert held == 10_000
    while held < file.size:
        held = store.take(file.name, held, file.size, read(file, held, 10_000))
    assert store.files()[0].read_bytes() == read(file, 0)


async def test_a_master_holds_nothing_of_what_it_pushes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hollow_model(folder)
    async with worker_at(tmp_path / "cache") as peer:
        words = [str(folder), peer.worker.endpoint, str(peer.worker.incarnation)]
        master = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("pushing.py")), *words, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(master.communicate(), 60)
    said = json.loads(out)
    buffers = UNACKNOWLEDGED * layer_files.CHUNK_BYTES
    assert said["pushed"] > 6 * buffers
    assert said["grew"] < 2 * buffers


def hollow_model(folder: Path) -> None:
    """A llama whose weights are zeros, which take no room on disk: two layers besides the ends, of 100 MB each."""
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


def test_bytes_that_are_not_the_offers_are_refused(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model, (2,))
    (file,) = offer.files
    whole = read(file, 0)
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
        (file.name, 0, file.size, whole + b"?"),
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
        store.take(whole.name, at, whole.size, read(whole, at, 10_000))
    store.take(half.name, 0, half.size, read(half, 0, 10_000))
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

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at in (0, 10_000):
        store.take(file.name, at, file.size, read(file, at, 10_000))
    with monkeypatch.context() as disk:
        disk.setattr(layer_files.os, "pwrite", full)
        with pytest.raises(ZrtError, match="No space left") as raised:
            store.take(file.name, 20_000, file.size, read(file, 20_000, 10_000))
    assert raised.value.kind == "insufficient_memory"
    assert store.take(file.name, 0, file.size, b"") == 20_000
    assert not store.complete
    with pytest.raises(ZrtError, match="not complete"):
        store.files()
    again = LayerStore(tmp_path, offer.model_hash)
    assert again.take(file.name, 0, file.size, b"") == 20_000
    with monkeypatch.context() as disk:
        disk.setattr(layer_files.os, "fsync", full)
        for at in range(20_000, file.size, 10_000):
            held = again.take(file.name, at, file.size, read(file, at, 10_000))
        assert held == file.size
        with pytest.raises(ZrtError, match="No space left"):
            again.files()
    assert not LayerStore(tmp_path, offer.model_hash).complete
    last = LayerStore(tmp_path, offer.model_hash)
    assert last.take(file.name, 0, file.size, b"") == file.size
    assert last.files()[0].read_bytes() == read(file, 0)


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


def test_what_else_lies_in_the_cache_keeps_nothing_from_being_taken(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model, (2,))
    (file,) = offer.files
    (tmp_path / ("a" * 64)).write_text("no folder")
    newer = b'{"config": "", "files": "in another version\'s way"}'
    other = tmp_path / hashlib.sha256(newer).hexdigest()
    other.mkdir()
    (other / "manifest.json").write_bytes(newer)
    (tmp_path / offer.model_hash).mkdir()
    (tmp_path / offer.model_hash / file.name).symlink_to(file.name)
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    assert not store.complete
    assert store.take(file.name, 0, file.size, read(file, 0)) == file.size
    assert [path.read_bytes() for path in store.files()] == [read(file, 0)]


@pytest.mark.parametrize("layers", [(1, 2), (1, 2, 3)])
def test_two_workers_with_one_cache_are_sent_the_same_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", 10_000)
    one, other = offer_of(model, (1, 2)), offer_of(model, layers)
    offers = [(offer, LayerStore(tmp_path, offer.model_hash)) for offer in (one, other)]
    unfinished = {(number, file) for number, (offer, _) in enumerate(offers) for file in offer.files}
    for offer, store in offers:
        store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    while unfinished:
        for number, file in sorted(unfinished, key=lambda each: (each[1].name, each[0])):
            store = offers[number][1]
            try:
                held = store.take(file.name, 0, file.size, b"")
                if held < file.size:
                    held = store.take(file.name, held, file.size, read(file, held, 10_000))
            except ZrtError as error:
                assert error.kind == "worker_failed", error
                continue
            if held == file.size:
                unfinished.discard((number, file))
    for offer, store in offers:
        assert [path.read_bytes() for path in store.files()] == [read(file, 0) for file in offer.files]
