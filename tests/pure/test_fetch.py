"""A model reference becomes a folder, or an error that names it and the ways out."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch import hub
from zrt.runtime.models.fetch.demo import NAME as DEMO
from zrt.runtime.models.fetch.resolve import place_of, resolve
from zrt.runtime.paths import home


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    "ref", ["no-such-name", "/no/such/folder", "./nothing", "a/b/c", "", "owner/", "../no-such", "a b/c"]
)
def test_what_is_neither_folder_nor_hub_id_is_named_with_the_ways_out(ref: str) -> None:
    with pytest.raises(ZrtError) as raised:
        resolve(ref)
    assert raised.value.kind == "bad_model"
    assert repr(ref) in raised.value.message
    assert "smollm2-135m, a folder, or a hub id" in raised.value.message


@pytest.mark.parametrize(
    "ref",
    ["owner/na--me", "owner/na..me", "own--er/name", "owner/name.git", "owner/name-", "owner/name.", "o/" + "n" * 99],
)
def test_an_id_that_the_hub_cannot_have_is_no_model(ref: str) -> None:
    with pytest.raises(ZrtError) as raised:
        resolve(ref)
    assert raised.value.kind == "bad_model"
    assert raised.value.message.startswith(f"no model {ref!r}: it is no folder, and no id of the hub: ")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    conf = tmp_path / "my.toml"
    conf.touch()
    with pytest.raises(
        ZrtError, match=r"my\.toml is a file; `zrt plan .*my\.toml` looks at a cluster file; a model is"
    ):
        resolve(str(conf))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ZrtError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZRT_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("ZRT_HOME", "")
    assert home() == Path("/home/somebody/.cache/zrt")


FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "model-1.safetensors": b"1" * 3000,
    "model-2.safetensors": b"2" * 5000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "consolidated.safetensors": b"3" * 9000,
    "pytorch_model.bin": b"4" * 9000,
    "README.md": b"hello",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"5" * 9000,
}
NAMES = {name for name in FILES if name.endswith((".json", ".jinja", ".safetensors")) and "/" not in name}
NAMES -= {"consolidated.safetensors"}
WEIGHTS = {name for name in NAMES if "safetensors" in name}
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP as huggingface_hub needs to list and download public models:
    owner/name, and others whose names begin so, all with the same files."""

    files: dict[str, bytes] = FILES
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = re.sub("^(/api/models)?/owner/name[0-9]+", r"\1/owner/name", self.path.partition("?")[0])
        self.asked.append(path)
        listed = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in self.files.items()]
        if re.fullmatch(f"/api/models/owner/name(/revision/(main|{COMMIT}))?", path):
            self.answer(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": listed}).encode())
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            self.answer(json.dumps(tree).encode())
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            self.answer(self.files[path.removeprefix(f"/owner/name/resolve/{COMMIT}/")], etag=path)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, data: bytes, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", f'"{etag.replace("/", "-")}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("ref", ["demo", "folder", "hub"])
def test_the_place_of_a_model_is_known_whether_it_is_there_or_not(
    ref: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZRT_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models" / DEMO
    if ref == "hub":
        folder = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    name = {"demo": DEMO, "folder": str(folder), "hub": "owner/name"}[ref]
    assert place_of(name) == (None if ref == "hub" else folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if ref == "hub":
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text(COMMIT)
    assert place_of(name) == folder == resolve(name, weights=False, text=False)


@pytest.fixture
def endpoint() -> Iterator[str]:
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import json, sys
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch import hub
from zrt.runtime.models.fetch.resolve import resolve
hub.ANSWER_S = float(sys.argv[3])
for ref in sys.argv[1].split(","):
    steps, said = [], []
    try:
        folder = resolve(
            ref, weights=sys.argv[2] != "config", text=sys.argv[2] != "no text",
            progress=lambda *step: steps.append(step), say=said.append,
        )
        print(json.dumps({"folder": str(folder), "steps": steps, "said": said}))
    except ZrtError as error:
        print(json.dumps({"kind": error.kind, "message": error.message, "said": said}))
"""


def resolved(ref: str, cache: Path, what: str = "all", patience: float = 8.0, **environment: str) -> dict[str, Any]:
    (answer,) = all_resolved([ref], cache, what, patience, **environment)
    return answer


def all_resolved(
    refs: Iterable[str], cache: Path, what: str = "all", patience: float = 8.0, **environment: str
) -> list[dict[str, Any]]:
    """`resolve` in a process of its own, since huggingface_hub reads its environment at import."""
    command = [sys.executable, "-c", PROGRAM, ",".join(refs), what, str(patience)]
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | environment
    environment = {"ZRT_HOME": str(cache / "zrt")} | environment
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def halved(cache: Path, *lacks: set[str]) -> list[str]:
    """Put models into huggingface_hub's cache as a program leaves them that fetches files one by
    one; each lacks some of its files. Return their refs."""
    refs = []
    for number, names in enumerate(lacks):
        model = cache / "hub" / f"models--owner--name{number}"
        snapshot = model / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)
        for name in NAMES - names:
            (snapshot / name).write_bytes(FILES[name])
        refs.append(f"owner/name{number}")
    return refs


def there(answer: dict[str, Any]) -> set[str]:
    return {file.name for file in Path(answer["folder"]).rglob("*") if file.is_file()}


def test_a_hub_model_comes_with_what_is_needed_and_nothing_else(endpoint: str, tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)
    assert there(answer) == NAMES
    total = sum(len(FILES[name]) for name in NAMES)
    assert all(
        (0 <= done <= all_ == total and what == "downloading owner/name") for done, all_, what in answer["steps"]
    )


def test_for_random_weights_no_weights_come(endpoint: str, tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, "config", HF_ENDPOINT=endpoint)
    assert not list(Path(answer["folder"]).glob("*.safetensors"))
    assert (Path(answer["folder"]) / "config.json").is_file()


def test_a_model_that_is_whole_in_the_cache_needs_no_hub(endpoint: str, tmp_path: Path) -> None:
    first = resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)
    assert resolved("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:1")["folder"] == first["folder"]
    offline = resolved("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert (offline["folder"], offline["said"]) == (first["folder"], [])
    Hub.asked.clear()
    assert there(resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)) == NAMES
    assert Hub.asked == []


def test_a_model_that_is_not_whole_in_the_cache_is_completed(endpoint: str, tmp_path: Path) -> None:
    """Whatever file it lacks, and however many. Whoever needs config and weights alone asks for no
    more."""
    one_each = [{name} for name in sorted(NAMES)]
    refs = halved(tmp_path, set(), *one_each, NAMES - {"config.json", "model-1.safetensors"})
    for answer in all_resolved(refs, tmp_path, "no text", HF_HUB_OFFLINE="1"):
        assert ("folder" in answer) or "is missing" in answer["message"]
    for ref, answer in zip(refs, all_resolved(refs, tmp_path, HF_ENDPOINT=endpoint), strict=True):
        assert there(answer) == NAMES, ref
    Hub.asked.clear()
    assert all("folder" in answer for answer in all_resolved(refs, tmp_path, HF_ENDPOINT=endpoint))
    assert Hub.asked == []


def test_without_the_hub_what_is_missing_is_named(tmp_path: Path) -> None:
    """Without config or weights a model is refused; of other files it is said that it lacks
    them."""
    one_each = sorted(NAMES)
    refs = halved(tmp_path, *({name} for name in one_each), set())
    *answers, whole = all_resolved(refs, tmp_path, HF_HUB_OFFLINE="1")
    assert whole["said"] == []
    for ref, name, answer in zip(refs, one_each, answers, strict=False):
        if name in WEIGHTS | {"config.json"}:
            assert answer["kind"] == "bad_model"
            assert answer["message"].startswith(f"{ref} is not whole in the cache of huggingface_hub (")
            assert f"{name} is missing) and the hub cannot be asked (" in answer["message"]
        else:
            (said,) = answer["said"]
            assert said.startswith(f"{ref} may not be whole and the hub cannot be asked (")
            assert said.endswith(f"; it is used without {name}")


def test_a_file_that_the_hub_once_listed_is_missed_by_name(endpoint: str, tmp_path: Path) -> None:
    lost = {"owner/name1": "tokenizer.json", "owner/name2": "model-2.safetensors"}
    for name, answer in zip(lost.values(), all_resolved(lost, tmp_path, HF_ENDPOINT=endpoint), strict=True):
        (Path(answer["folder"]) / name).unlink()
    for name, answer in zip(lost.values(), all_resolved(lost, tmp_path, HF_HUB_OFFLINE="1"), strict=True):
        assert f"({name} is missing) and the hub cannot be asked" in answer["message"]


def test_a_model_the_hub_does_not_have_is_named(endpoint: str, tmp_path: Path) -> None:
    answer = resolved("owner/other", tmp_path, HF_ENDPOINT=endpoint)
    assert answer["kind"] == "bad_model"
    assert "the hub has no model owner/other" in answer["message"]


@pytest.mark.parametrize(
    "environment",
    [{"HF_ENDPOINT": "http://127.0.0.1:1"}, {"HF_ENDPOINT": "http://no-such-host.invalid"}, {"HF_HUB_OFFLINE": "1"}],
    ids=["refused", "unknown-host", "offline"],
)
def test_without_a_network_the_model_and_the_ways_out_are_named(environment: dict[str, str], tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, **environment)
    assert answer["kind"] == "bad_model"
    assert "owner/name is not whole in the cache" in answer["message"]
    assert "name a model folder, or use the demo model" in answer["message"]


def test_a_cache_in_no_home_directory_is_named(tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, HF_HOME="~nosuchuser/hf", HF_HUB_OFFLINE="1")
    assert answer["kind"] == "bad_config"
    assert answer["message"].startswith("the cache of huggingface_hub is ~nosuchuser/hf")
    assert answer["message"].endswith(": set HF_HOME to a folder")


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = resolved(
            "owner/name", tmp_path, patience=1.0, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
    assert answer["kind"] == "bad_model"
    assert "the hub cannot be asked" in answer["message"]


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ({}, "config.json"),
        ({"config.json": "{}"}, "model.safetensors or model.safetensors.index.json"),
        (
            {"config.json": "{}", "model-00001-of-00002.safetensors": ""},
            "model.safetensors or model.safetensors.index.json",
        ),
        ({"config.json": "{}", "model.safetensors": ""}, None),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "x.safetensors"}}'},
            "x.safetensors",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, "readable model.safetensors.index.json"),
    ],
)
def test_what_a_folder_lacks(tmp_path: Path, files: dict[str, str], lacks: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert hub.lacking(tmp_path, weights=True) == lacks
