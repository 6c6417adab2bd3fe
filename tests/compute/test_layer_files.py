"""The files of layers that travel: as a master offers them, and as a worker keeps them."""

import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.layer_masters import offer_of, read

from zrt.actors.block_server.layer_lending import offer as offer_module
from zrt.actors.block_server.layer_lending.offer import Offer
from zrt.actors.layer_worker import assigned_layers, store_files
from zrt.actors.layer_worker import store as store_module
from zrt.actors.layer_worker.assigned_layers import AssignedLayers
from zrt.actors.layer_worker.store import LayerStore
from zrt.runtime.compute.weight_sources import Checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.layers import LayerAssignment, PrepareLayers, layer_name
from zrt.runtime.models.checkpoint import layer_manifest


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=6)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer_manifest, offer_module, store_module, store_files):
        monkeypatch.setattr(module, "PIECE_BYTES", 10_000)


@pytest.mark.usefixtures("small_pieces")
def test_a_file_goes_on_where_its_last_whole_piece_ended(model: Path, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("small_pieces")
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

    monkeypatch.setattr(offer_module, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(hashlib, "sha256", Counted)
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


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_is_not_the_manifests_is_taken_again_from_its_beginning(model: Path, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("small_pieces")
def test_files_that_another_offer_brought_are_taken_over(model: Path, tmp_path: Path) -> None:
    first, second = offer_of(model, (1, 2)), offer_of(model, (1, 2, 3))
    store = LayerStore(tmp_path, first.model_hash)
    store.take("manifest.json", 0, len(first.manifest), first.manifest)
    whole, half = first.files
    for at in range(0, whole.size, 10_000):
        store.take(whole.name, at, whole.size, read(whole, at, 10_000))
    store.take(half.name, 0, half.size, read(half, 0, 10_000))
    assert not store.complete  # and the first has its name by now
    again = LayerStore(tmp_path, second.model_hash)
    again.take("manifest.json", 0, len(second.manifest), second.manifest)
    held = [again.take(file.name, 0, file.size, b"") for file in second.files]
    assert held == [whole.size, 10_000, 0]
    kept = tmp_path / second.model_hash / whole.name
    assert kept.samefile(tmp_path / first.model_hash / whole.name)


@pytest.mark.usefixtures("small_pieces")
def test_half_a_file_is_never_a_whole_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = offer_of(model, (2,))
    (file,) = offer.files
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at in (0, 10_000):
        store.take(file.name, at, file.size, read(file, at, 10_000))
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
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
        disk.setattr(os, "fsync", full)
        for at in range(20_000, file.size, 10_000):
            held = again.take(file.name, at, file.size, read(file, at, 10_000))
        assert held == file.size
        with pytest.raises(ZrtError, match="No space left"):
            again.files()
    assert not LayerStore(tmp_path, offer.model_hash).complete
    last = LayerStore(tmp_path, offer.model_hash)
    assert last.take(file.name, 0, file.size, b"") == file.size
    assert last.files()[0].read_bytes() == read(file, 0)


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


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("layers", [(1, 2), (1, 2, 3)])
def test_two_workers_with_one_cache_are_sent_the_same_at_once(
    model: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
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


def give(store: LayerStore, offer: Offer) -> None:
    """All of it, as it would be pushed, until its files are whole."""
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    for file in offer.files:
        held = store.take(file.name, 0, file.size, b"")
        while held < file.size:
            held = store.take(file.name, held, file.size, read(file, held, layer_manifest.PIECE_BYTES))
    store.files()


IN_THE_WAY: dict[str, Callable[[Path, str], None]] = {
    "a file, in place of the cache": lambda cache, _: cache.write_text(""),
    "a file, in place of the folder": lambda cache, model_hash: (made(cache) / model_hash).write_text(""),
    "a folder, in place of the manifest": lambda cache, name: made(cache / name / "manifest.json"),
    "a folder, in place of half a file": lambda cache, name: made(cache / name / "layer-00002.safetensors.part"),
    "a folder, in place of a file": lambda cache, name: made(cache / name / "layer-00002.safetensors"),
}


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("way", IN_THE_WAY)
def test_what_is_in_the_way_of_files_is_named_with_the_way_out(model: Path, tmp_path: Path, way: str) -> None:
    offer, cache = offer_of(model, (1, 2)), tmp_path / "layers"
    IN_THE_WAY[way](cache, offer.model_hash)
    with pytest.raises(ZrtError, match="ZRT_HOME elsewhere") as raised:
        give(LayerStore(cache, offer.model_hash), offer)
    assert raised.value.kind == "bad_config"
    assert str(cache) in raised.value.message


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, "bad_config"),
        (errno.EROFS, "bad_config"),
        (errno.EIO, "bad_config"),
        (errno.ENOSPC, "insufficient_memory"),
        (errno.EDQUOT, "insufficient_memory"),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite", "ftruncate", "fsync", "replace"])
def test_what_the_system_refuses_is_named_with_the_way_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: str
) -> None:
    offer = offer_of(model, (1, 2))

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    store = LayerStore(tmp_path, offer.model_hash)
    with monkeypatch.context() as system:
        system.setattr(os, call, refuse)
        with pytest.raises(ZrtError, match="ZRT_HOME elsewhere") as raised:
            give(store, offer)
    assert raised.value.kind == kind
    assert str(tmp_path) in raised.value.message
    give(store, offer)  # once it is put right


@pytest.mark.parametrize("when", ["in its midst", "at its end", "when it is whole", "before this process"])
@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_is_gone_is_sent_again(model: Path, tmp_path: Path, when: str) -> None:
    offer = offer_of(model, (2,))
    (file,) = offer.files
    folder = tmp_path / offer.model_hash
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    ends = 10_000 if when == "in its midst" else file.size
    for at in range(0, ends, 10_000):
        held = store.take(file.name, at, file.size, read(file, at, 10_000))
    if when == "when it is whole":
        store.files()
    elif when == "before this process":
        assert store.complete
        store = LayerStore(tmp_path, offer.model_hash)
        assert store.complete
    for name in (f"{file.name}.part", file.name):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ZrtError, match="sent again") as raised:  # noqa: PT012  either says so
        if held < file.size:
            store.take(file.name, held, file.size, read(file, held, 10_000))
        store.files()
    assert raised.value.kind == "worker_failed"
    give(store, offer)
    assert store.files()[0].read_bytes() == read(file, 0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _empty_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (lambda path: path.unlink(), "is gone"),
    "cut off": (lambda path: os.truncate(path, 99), r"is cut off \(99 of \d+ bytes\)"),
    "empty": (lambda path: os.truncate(path, 0), r"is cut off \(0 of \d+ bytes\)"),
    "longer": (lambda path: os.truncate(path, 1 << 20), r"is too long \(1048576 bytes, not \d+\)"),
    "other bytes": (_flip, "is damaged .it holds other bytes than were sent.$"),
    "a folder": (_empty_folder, "is not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_what_is_wrong_with_a_file_that_was_whole_is_told(
    model: Path, tmp_path: Path, damage: str, checked: bool
) -> None:
    """And it is sent again, unless a person has to make way."""
    offer = offer_of(model, (1, 2))
    give(LayerStore(tmp_path, offer.model_hash), offer)
    store = LayerStore(tmp_path, offer.model_hash)
    assert store.complete
    if checked:
        store.files()
    harm, words = DAMAGE[damage]
    harm(tmp_path / offer.model_hash / "layer-00002.safetensors")
    with pytest.raises(ZrtError) as raised:
        store.files(anew=checked)
    assert raised.value.kind == "worker_failed"
    said, again = raised.value.message.rsplit(": ", 1)
    assert re.fullmatch(rf"layer-00002.safetensors in \S+ {words}", said), said
    assert again == "it is sent again"
    if damage != "a folder":
        give(store, offer)
        assert [path.read_bytes() for path in store.files()] == [read(file, 0) for file in offer.files]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_read_is_not_told_as_gone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    offer = offer_of(model, (2,))
    give(LayerStore(tmp_path, offer.model_hash), offer)
    store = LayerStore(tmp_path, offer.model_hash)
    assert store.complete

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as system:
        system.setattr("zrt.actors.layer_worker.store_files.sound_bytes", refuse)
        with pytest.raises(ZrtError) as raised:
            store.files()
    assert f"layer-00002.safetensors in {tmp_path / offer.model_hash} cannot be read ({os.strerror(number)})" in str(
        raised.value
    )
    give(store, offer)


@pytest.mark.parametrize(
    ("harm", "kind", "words"),
    [
        (lambda path: os.truncate(path, 99), "worker_failed", "is cut off (99 of "),
        (
            lambda path: path.write_bytes(b"?" * path.stat().st_size),
            "worker_failed",
            "is damaged (it holds other bytes",
        ),
        (lambda path: path.unlink(), "worker_failed", "is gone"),
        (None, None, "the disk is on fire"),
    ],
)
def test_what_befalls_a_file_while_it_is_loaded_is_told_and_the_worker_is_blank_again(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], None] | None,
    kind: str | None,
    words: str,
) -> None:
    """Whatever a load ends with, the worker is not shown as loading for ever."""
    states = list[str]()
    worker = AssignedLayers(tmp_path, "cpu", 0, states.append)
    worker.prepare(PrepareLayers((model / "config.json").read_text(), "float32", 1 << 20, 64, 1))
    offer = offer_of(model, (2,))
    worker.assign(LayerAssignment([layer_name(2)], offer.model_hash))
    assert worker._store is not None
    give(worker._store, offer)
    opened = assigned_layers.Checkpoint.of

    def befall(files: list[Path]) -> Checkpoint:
        if harm is None:
            raise OSError(words)
        harm(files[0])
        return opened(files)

    with monkeypatch.context() as time_of_check:
        time_of_check.setattr(assigned_layers.Checkpoint, "of", befall)
        with pytest.raises(ZrtError if kind else OSError) as raised:
            worker.load()
    assert words in str(raised.value)
    assert not isinstance(raised.value, ZrtError) or raised.value.kind == kind
    give(worker._store, offer)
    worker.load()
    assert states == ["loading", "blank", "ready"]
    worker.close()


def test_files_that_were_never_sent_are_the_masters_to_send(model: Path, tmp_path: Path) -> None:
    offer = offer_of(model, (1, 2))
    store = LayerStore(tmp_path, offer.model_hash)
    store.take("manifest.json", 0, len(offer.manifest), offer.manifest)
    with pytest.raises(ZrtError, match=r"bad_request: .*not complete"):
        store.files()
