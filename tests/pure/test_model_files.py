"""What stands in the place of a model's file and is not the file is named as what it is, whichever
file of the model it is."""

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.vocabularies import write_tokenizer

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import find_model_file, open_model_file, read_model_file
from zrt.runtime.models.architecture.config_json import config_text
from zrt.runtime.models.checkpoint.report import inspect
from zrt.runtime.models.fetch.resolve import resolve

ROOT = Path(__file__).parents[2]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
STAND_INS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pointer of Git LFS": (
        lambda file: file.write_bytes(POINTER),
        r"is a pointer of Git LFS and not the file itself: `git lfs pull` gets it",
    ),
    "a link to nothing": (
        lambda file: file.symlink_to("../blobs/0123"),
        r"\(a link to \.\./blobs/0123\): No such file",
    ),
    "a pipe": (os.mkfifo, r"it is not a regular file"),
}
EVERY_FILE = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "model.safetensors.index.json", "model-00002-of-00003.safetensors"),
]


@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("stand_in", STAND_INS)
def test_what_stands_in_the_place_of_a_file_is_named(
    make_model: Callable[..., Path], tmp_path: Path, name: str, stand_in: str
) -> None:
    folder = shutil.copytree(make_model("llama", files=3), tmp_path / "model")
    write_tokenizer(folder, "byte-level")
    make, says = STAND_INS[stand_in]
    file = next(folder.glob(name.replace("00003", "*")), folder / name)
    file.unlink(missing_ok=True)
    make(file)
    problems = [problem.message for problem in inspect(folder).problems]
    assert [bool(re.search(f"{re.escape(str(file))}.*{says}", problem)) for problem in problems] == [True], problems
    assert resolve(str(folder)) == folder  # such a folder is a model's


@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("read", [open_model_file, read_model_file, find_model_file])
def test_every_reader_names_it(read: Callable[[Path], object], stand_in: str, tmp_path: Path) -> None:
    make, says = STAND_INS[stand_in]
    make(tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZrtError, match=says):
        read(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_not_there_is_found_missing_and_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    assert find_model_file(tmp_path / "none") is None
    (tmp_path / "file").write_bytes(b"12345")
    assert read_model_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ZrtError, match="is larger than 4 bytes"):
        read_model_file(tmp_path / "file", 4)
    with pytest.raises(ZrtError, match=r"there is no .*config\.json: a model folder holds config\.json"):
        config_text(tmp_path)


def test_the_rooms_that_read_models_open_their_files_in_no_other_way() -> None:
    found = []
    rooms = ("runtime/text", "runtime/models/architecture", "runtime/models/checkpoint", "actors/coordinator")
    rooms += ("actors/block_server/layer_lending", "actors/block_server/tensor_parallel", "actors/tp_rank")
    own = ROOT / "runtime/models/checkpoint/tensor_digests.py"  # reads what zrt itself has written
    for path in (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")) if path != own):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.Call(func=ast.Attribute(attr="read_text" | "read_bytes" | "from_file" | "from_pretrained"))
                    | ast.Call(func=ast.Name(id="open" | "safe_open" | "load_file"))
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
