"""A model's identity: it changes with every tensor and every value that decides numbers, is found
out once a machine, and what the coordinator makes of it."""

import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from safetensors.torch import load_file

from zrt.actors.coordinator.fleet.served_model import ServedModel
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint import tensor_digests
from zrt.runtime.models.checkpoint.identity import (
    DRAWN,
    UNDECIDING,
    ModelContent,
    config_parts,
    folder_state,
    read_content,
)
from zrt.runtime.models.checkpoint.index import CheckpointIndex
from zrt.runtime.models.checkpoint.tensor_digests import TensorDigests

SINGLE = "model.safetensors"
DOWN = "model.layers.3.mlp.down_proj.weight"
MakeModel = Callable[..., Path]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are remembered, also of files that were written a moment ago."""
    monkeypatch.setattr(tensor_digests, "SETTLED_S", -1.0)
    return tmp_path / "digests"


@pytest.fixture
def copied(make_model: MakeModel, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model that a test may change."""

    def copy(**options: object) -> Path:
        return shutil.copytree(make_model("llama", **options), tmp_path / "model")

    return copy


def content(folder: Path, memory: Path | TensorDigests, first: int = 0, last: int = 3) -> ModelContent:
    digests = memory if isinstance(memory, TensorDigests) else TensorDigests(memory)
    return read_content(folder, (first, last), random=False, digests=digests, cancelled=lambda: False)


def flip(folder: Path, name: str, at: int = 0) -> None:
    """Change one bit of a tensor, as somebody would who saves a file anew."""
    entry = CheckpointIndex.open(folder).entry(name)
    data = bytearray(entry.file.read_bytes())
    data[entry.begin + at] ^= 1
    new = entry.file.with_suffix(".new")
    new.write_bytes(data)
    new.replace(entry.file)


def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(file: Path) -> int:
        raise AssertionError(f"{file} is hashed again")

    monkeypatch.setattr(tensor_digests, "open_model_file", opened)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_one_bit_of_any_tensor_is_another_part_and_no_other(
    copied: Callable[..., Path], memory: Path, files: int, tied: bool
) -> None:
    folder = copied(files=files, tied=tied)
    names = [name for name in CheckpointIndex.open(folder).names() if not (tied and name == "lm_head.weight")]
    before = content(folder, memory).parts
    for name in names:
        flip(folder, name, at=1)
        now = content(folder, memory).parts
        changed = {part for part in now if now[part] != before[part]}
        assert changed == ({name, "lm_head.weight"} if tied and name == "model.embed_tokens.weight" else {name})
        before = now


@pytest.mark.parametrize("cut", [(0,), (1,), (2,), (0, 1, 2)])
def test_stages_have_together_what_the_whole_model_has(
    make_model: MakeModel, memory: Path, cut: tuple[int, ...]
) -> None:
    folder = make_model("llama", files=3)
    together: dict[str, str] = {}
    for first, last in zip((0, *(block + 1 for block in cut)), (*cut, 3), strict=True):
        together |= content(folder, memory, first, last).parts
    assert together == content(make_model("llama"), memory).parts  # the same weights, in one file


def test_a_digest_is_that_of_dtype_shape_and_pieces(
    make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_digests, "PIECE_BYTES", 1000)
    folder = make_model("llama")
    data = load_file(folder / SINGLE)[DOWN].numpy().tobytes()
    pieces = b"".join(sha256(data[at : at + 1000]).digest() for at in range(0, len(data), 1000))
    assert content(folder, memory).parts[DOWN] == sha256(b"F32 [64, 96] " + pieces).hexdigest()


def test_every_field_of_a_spec_is_a_part_or_decides_nothing(make_model: MakeModel) -> None:
    spec = read_spec(make_model("llama"))
    named = {part.removeprefix("config.json: ") for part in config_parts(spec, random=True)}
    assert named == {field.name for field in fields(ModelSpec)} - UNDECIDING - {"blocks"} | {"rope", "window"}
    assert config_parts(spec, random=False).keys() == {f"config.json: {name}" for name in named - DRAWN}


def in_place(file: Path, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(data)


def in_memory(file: Path, data: bytes) -> None:
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        memory[:] = data
        memory.flush()


def by_another_file(file: Path, data: bytes) -> None:
    file.with_suffix(".new").write_bytes(data)
    file.with_suffix(".new").replace(file)


@pytest.mark.parametrize("rewrite", [in_place, in_memory, by_another_file])
def test_other_bytes_of_the_same_size_and_time_are_seen(
    copied: Callable[..., Path], memory: Path, rewrite: str
) -> None:
    folder = copied()
    file, before = folder / SINGLE, content(folder, memory)
    times, data = file.stat(), bytearray(file.read_bytes())
    data[CheckpointIndex.open(folder).entry(DOWN).begin] ^= 1
    rewrite(file, bytes(data))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    now = content(folder, memory)
    assert {part for part in now.parts if now.parts[part] != before.parts[part]} == {DOWN}
    with pytest.raises(ZrtError, match=SINGLE):
        before.check_unchanged()
    now.check_unchanged()


def test_what_was_hashed_is_not_hashed_again(
    make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama", files=3)
    told: list[int] = []

    def found(first: int, last: int) -> ModelContent:
        digests = TensorDigests(memory)
        return read_content(
            folder, (first, last), random=False, digests=digests, cancelled=lambda: False, hashes=told.append
        )

    together = {**found(0, 1).parts, **found(2, 3).parts}
    assert sum(told) == sum(
        tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values()
    )
    never_read(monkeypatch)
    assert found(0, 3).parts == together
    assert len(told) == 2


def test_what_was_written_a_moment_ago_is_not_remembered(copied: Callable[..., Path], tmp_path: Path) -> None:
    content(copied(), tmp_path / "digests")
    assert list((tmp_path / "digests").glob("*.json")) == []


CHILD = """
import sys
from pathlib import Path
from zrt.runtime.models.checkpoint import tensor_digests
from zrt.runtime.models.checkpoint.identity import read_content
tensor_digests.SETTLED_S = -1.0
print("begin", flush=True)
sys.stdin.readline()
folder, memory, block = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
digests = tensor_digests.TensorDigests(memory)
read_content(folder, (block, block), random=False, digests=digests, cancelled=lambda: False)
"""


def test_processes_that_hash_at_once_lose_nothing(
    make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, folder, memory, str(block)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for block in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "begin\n"
    for child in children:
        child.communicate("go\n", timeout=30)
    assert [child.returncode for child in children] == [0] * 4
    assert [place.suffix for place in memory.iterdir() if place.is_file() and place.name != "lock"] == [".json"]
    parts = content(folder, memory.with_name("other")).parts
    never_read(monkeypatch)
    assert content(folder, memory).parts == parts


def test_of_two_that_want_the_same_tensors_one_hashes_and_the_other_waits(
    make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, waits, go = Event(), Event(), Event()
    hashed: list[Path] = []
    really = tensor_digests._hashed

    def counted(file: Path, *rest: Any) -> dict[str, str]:
        hashed.append(file)
        return really(file, *rest)

    monkeypatch.setattr(tensor_digests, "_hashed", counted)

    def first() -> bool:
        hashes.set()
        return not go.wait(20)

    def second() -> bool:
        waits.set()
        return False

    def found(cancelled: Callable[[], bool]) -> ModelContent:
        folder, digests = make_model("llama"), TensorDigests(memory)
        return read_content(folder, (1, 2), random=False, digests=digests, cancelled=cancelled)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(found, first)
        assert hashes.wait(20)
        other = pool.submit(found, second)
        assert waits.wait(20)
        go.set()
        assert one.result().parts == other.result().parts
    assert len(hashed) == 1


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"file": 1}'])
def test_what_is_remembered_wrongly_is_hashed_again(make_model: MakeModel, memory: Path, text: bytes) -> None:
    folder = make_model("llama")
    parts = content(folder, memory).parts
    for place in memory.glob("*.json"):
        place.write_bytes(text)
    assert content(folder, memory).parts == parts


def test_a_memory_that_cannot_be_written_is_done_without(make_model: MakeModel, memory: Path, tmp_path: Path) -> None:
    memory.write_bytes(b"")  # no folder can be there
    assert content(make_model("llama"), memory).parts == content(make_model("llama"), tmp_path / "other").parts


def test_files_that_were_hashed_long_ago_are_forgotten(
    make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_digests, "MOST_FILES", 2)
    content(make_model("llama", files=3), memory)
    assert len(list(memory.glob("*.json"))) == 2


def test_a_file_that_is_written_while_it_is_hashed_is_refused(copied: Callable[..., Path], memory: Path) -> None:
    folder = copied()
    file, once = folder / SINGLE, [True]

    def written() -> bool:
        if once:
            once.clear()
            flip(folder, DOWN)
        return False

    with pytest.raises(ZrtError, match=f"{file} was changed while it was loaded") as error:
        read_content(folder, (0, 3), random=False, digests=TensorDigests(memory), cancelled=written)
    assert error.value.kind == "bad_model"
    assert list(memory.glob("*.json")) == []  # nothing of it is remembered


def test_hashing_can_be_stopped(make_model: MakeModel, memory: Path) -> None:
    with pytest.raises(ZrtError) as error:
        read_content(make_model("llama"), (0, 3), random=False, digests=TensorDigests(memory), cancelled=lambda: True)
    assert error.value.kind == "cancelled"


@pytest.mark.parametrize("changed", ["config.json", SINGLE])
def test_the_state_of_a_folder_shows_that_it_was_changed(copied: Callable[..., Path], changed: str) -> None:
    folder = copied()
    before = folder_state(folder)
    assert folder_state(folder) == before
    data = (folder / changed).read_bytes()
    (folder / changed).unlink()
    assert folder_state(folder) != before
    (folder / changed).write_bytes(data)
    assert folder_state(folder) != before


# ---- the coordinator's ---------------------------------------------------------------------------


def served(folder: Path, memory: Path, *, random: bool = False) -> ServedModel:
    return ServedModel(folder, read_spec(folder), random=random, digests=TensorDigests(memory))


ONE, OTHER = Address("one", 1, ""), Address("other", 1, "")


def differing(model: ServedModel, found: ModelContent, asker: Address = ONE) -> list[str]:
    return model.differing(found.parts, lambda: False, asker)


def test_whoever_has_the_same_model_is_confirmed(
    copied: Callable[..., Path], make_model: MakeModel, memory: Path
) -> None:
    model = served(copied(files=3), memory)
    for first, last in ((0, 3), (0, 1), (2, 3), (1, 2)):
        assert differing(model, content(make_model("llama"), memory, first, last)) == []


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_a_model_that_is_saved_anew_is_refused_for_blocks_that_nobody_had_loaded_as_for_others(
    copied: Callable[..., Path], make_model: MakeModel, memory: Path, block: int, asked_before: bool
) -> None:
    folder = copied()
    model = served(folder, memory)
    old = content(folder, memory, block, block)
    if asked_before:
        assert differing(model, old) == []
    shutil.copy(make_model("llama", seed=1) / SINGLE, folder / SINGLE)
    new = content(folder, memory, block, block)
    named = differing(model, new)
    assert named == list(new.files)
    refusal = new.unlike(named)
    assert (refusal.kind, f"{folder / SINGLE} (tensor " in refusal.message) == ("bad_model", True)
    shutil.copy(make_model("llama") / SINGLE, folder / SINGLE)
    if asked_before:
        assert differing(model, content(folder, memory, block, block)) == []


def test_a_model_is_known_by_its_content_and_not_by_its_files_times(copied: Callable[..., Path], memory: Path) -> None:
    folder = copied()
    model = served(folder, memory)
    assert differing(model, content(folder, memory)) == []
    (folder / SINGLE).touch()
    assert differing(model, content(folder, memory)) == []


def test_what_the_coordinator_has_no_file_of_is_what_the_first_has(
    copied: Callable[..., Path], make_model: MakeModel, memory: Path
) -> None:
    folder = copied()
    (folder / SINGLE).unlink()
    model = served(folder, memory)
    assert differing(model, content(make_model("llama"), memory, 0, 1)) == []
    other = content(make_model("llama", seed=1), memory, 1, 2)
    with pytest.raises(ZrtError, match=r"one loads another model\.layers\.1\."):
        differing(model, other, OTHER)
    model.serves(ONE)
    model.forget(ONE)
    assert differing(model, other, OTHER) == [part for part in other.files if ".layers.1." in part]


def test_what_an_asker_has_that_never_came_to_serve_binds_nobody(
    copied: Callable[..., Path], make_model: MakeModel, memory: Path
) -> None:
    folder = copied()
    (folder / SINGLE).unlink()
    model = served(folder, memory)
    wrong, right = content(make_model("llama", seed=1), memory, 0, 1), content(make_model("llama"), memory, 1, 2)
    assert differing(model, wrong, ONE) == []
    model.forget(ONE)
    assert differing(model, right, OTHER) == []
    assert differing(model, right, ONE) == []
    model.forget(OTHER)  # one claims the same
    model.serves(ONE)
    assert differing(model, wrong, OTHER) == [part for part in wrong.files if ".layers.1." in part]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_file_that_the_coordinator_cannot_read_is_not_the_askers_fault_unless_it_is_changed(
    copied: Callable[..., Path], make_model: MakeModel, memory: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    folder = copied()
    model, found = served(folder, memory), content(make_model("llama"), memory)

    def unreadable(file: Path) -> int:
        if meanwhile:
            flip(folder, DOWN)
        raise ZrtError("bad_model", f"cannot read {file}")

    with monkeypatch.context() as during:
        during.setattr(tensor_digests, "open_model_file", unreadable)
        if meanwhile:
            assert differing(model, found) == list(found.files)
            return
        with pytest.raises(ZrtError, match=f"cannot read {folder / SINGLE}"):
            differing(model, found)
    assert differing(model, found) == []


def test_a_config_that_decides_other_numbers_is_named(copied: Callable[..., Path], memory: Path) -> None:
    folder = copied()
    model = served(folder, memory)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25, "transformers_version": "0"}))
    found = content(folder, memory)
    named = differing(model, found)
    assert named == ["config.json: norm_eps"]
    assert f"{folder / 'config.json'} (norm_eps differs)" in found.unlike(named).message


def test_random_weights_are_their_config(copied: Callable[..., Path], memory: Path) -> None:
    folder = copied()
    (folder / SINGLE).unlink()
    model = served(folder, memory, random=True)

    def found() -> ModelContent:
        digests = TensorDigests(memory)
        return read_content(folder, (0, 1), random=True, digests=digests, cancelled=lambda: False)

    assert differing(model, found()) == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": 0.25}))
    assert differing(model, found()) == ["config.json: init_range"]


def test_a_name_that_is_none_of_the_models_differs(make_model: MakeModel, memory: Path) -> None:
    model = served(make_model("llama"), memory)
    assert model.differing({"model.layers.4.mlp.down_proj.weight": "0"}, lambda: False, ONE)
    assert model.differing({"x" * 80: "0"}, lambda: False, ONE) == ["x" * 80]


def test_blocks_that_the_folders_model_has_not_are_refused(make_model: MakeModel, memory: Path) -> None:
    with pytest.raises(ZrtError, match="4 blocks"):
        content(make_model("llama"), memory, 3, 4)
