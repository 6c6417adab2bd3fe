"""A model reference becomes a folder, or an error that names it and the ways out."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch import hub
from zrt.runtime.models.fetch.resolve import resolve
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
    "tokenizer.json": b'{"a": 1}',
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
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP as huggingface_hub needs to list and download one public model."""

    files: dict[str, bytes] = FILES

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        listed = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in self.files.items()]
        if path in ("/api/models/owner/name", "/api/models/owner/name/revision/main"):
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


@pytest.fixture
def endpoint() -> Iterator[str]:
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
steps = []
try:
    folder = resolve(sys.argv[1], weights=sys.argv[2] == "weights", progress=lambda *step: steps.append(step))
    print(json.dumps({"folder": str(folder), "steps": steps}))
except ZrtError as error:
    print(json.dumps({"kind": error.kind, "message": error.message}))
"""


def resolved(ref: str, cache: Path, weights: bool = True, patience: float = 8.0, **environment: str) -> dict[str, Any]:
    """`resolve` in a process of its own, since huggingface_hub reads its environment at import."""
    command = [sys.executable, "-c", PROGRAM, ref, "weights" if weights else "config", str(patience)]
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | environment
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_hub_model_comes_with_what_is_needed_and_nothing_else(endpoint: str, tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"}
    names |= {"model-1.safetensors", "model-2.safetensors"}
    assert {file.name for file in Path(answer["folder"]).rglob("*") if file.is_file()} == names
    total = sum(len(FILES[name]) for name in names)
    assert all(
        (0 <= done <= all_ == total and what == "downloading owner/name") for done, all_, what in answer["steps"]
    )


def test_for_random_weights_no_weights_come(endpoint: str, tmp_path: Path) -> None:
    answer = resolved("owner/name", tmp_path, weights=False, HF_ENDPOINT=endpoint)
    assert not list(Path(answer["folder"]).glob("*.safetensors"))
    assert (Path(answer["folder"]) / "config.json").is_file()


def test_a_model_that_is_whole_in_the_cache_needs_no_hub(endpoint: str, tmp_path: Path) -> None:
    first = resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)
    assert resolved("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:1")["folder"] == first["folder"]
    assert resolved("owner/name", tmp_path, HF_HUB_OFFLINE="1")["folder"] == first["folder"]


def test_a_model_that_is_not_whole_in_the_cache_is_completed(endpoint: str, tmp_path: Path) -> None:
    folder = Path(resolved("owner/name", tmp_path, weights=False, HF_ENDPOINT=endpoint)["folder"])
    assert "kind" in resolved("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert resolved("owner/name", tmp_path, HF_ENDPOINT=endpoint)["folder"] == str(folder)
    assert len(list(folder.glob("*.safetensors"))) == 2


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
        ({"config.json": "{}"}, "*.safetensors file"),
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
