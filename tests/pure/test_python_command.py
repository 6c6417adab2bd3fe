"""Every child is started in one way: it imports only what is installed, and runs in a folder that
is always there."""

import ast
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from zrt.actors.options import ClusterOptions
from zrt.runtime.models.fetch import demo
from zrt.runtime.models.fetch.resolve import local_folder
from zrt.runtime.process.python_command import FILES, FOLDER, SEARCHED, environment, python_command

ROOT = Path(__file__).parents[2]
STARTERS = {"runtime/process/spawn.py", "runtime/cli/detach.py", "runtime/models/fetch/demo.py"}
"""The files that start processes."""
STARTING = {
    *("Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "system", "popen"),
    *("create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"),
    *("fork", "forkpty", "posix_spawn", "posix_spawnp"),
    *(f"{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}
STARTING_MODULES = {"subprocess", "asyncio", "os", "pty"}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = [path for room in ("runtime", "actors", "tui") for path in sorted((ROOT / room).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


def test_every_start_of_a_process_gives_it_the_folder_and_the_environment_of_children() -> None:
    starts: dict[str, list[ast.Call]] = {}
    for path, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                    module in STARTING_MODULES and name in STARTING and (module, name) != ("asyncio", "run")
                ):
                    starts.setdefault(path, []).append(node)
                case ast.ImportFrom(module=str(module)) | ast.Import(names=[ast.alias(name=module)]):
                    assert not module.startswith(("multiprocessing", "concurrent.futures.process")), path
                    if isinstance(node, ast.ImportFrom) and module in STARTING_MODULES:
                        assert not STARTING & {alias.name for alias in node.names}, path
    assert set(starts) == STARTERS
    for calls in starts.values():
        (call,) = calls
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert ast.unparse(call.func) == "subprocess.Popen"
        assert given["cwd"] == "FOLDER"
        assert "environment(os.environ)" in given["env"]


def test_the_path_of_this_python_is_used_in_one_place_and_else_in_texts() -> None:
    used = set()
    for path, tree in sources():
        texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "executable" and id(node) not in texts:
                used.add(path)
    assert used == {"runtime/process/python_command.py"}


@pytest.fixture
def strange_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder we are in, with modules that must not be imported: they say so and fail."""
    for name in ("queue.py", "random.py", "numpy.py", "runpy.py", "ctypes.py", "zrt/runtime/process/tied.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"raise SystemExit('{name} was imported from the start folder')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("strange_folder")
@pytest.mark.parametrize("searched", [None, "", ":", "/nowhere:"])
def test_a_child_imports_nothing_from_the_folder_of_its_start(
    searched: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if searched is not None:
        monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [searched, os.environ.get("PYTHONPATH")])))
    with demo._child(["pip", "--version"], {}, subprocess.PIPE, subprocess.STDOUT) as child:
        said, _ = child.communicate(timeout=60)
    assert said.startswith(b"pip ")
    assert child.returncode == 0


def test_a_child_does_not_search_the_folder_it_runs_in() -> None:
    program = ["site"]  # prints sys.path
    done = subprocess.run(
        python_command(*program), cwd=FOLDER, env=environment(os.environ), capture_output=True, text=True, timeout=60
    )
    searched = [line.strip(" ,'") for line in done.stdout.partition("[")[2].partition("]")[0].splitlines()]
    assert any("site-packages" in folder for folder in searched)
    assert not {"", FOLDER, os.getcwd()} & set(filter(None, searched))


@pytest.mark.parametrize("name", FILES)
def test_a_relative_path_of_the_environment_is_absolute_for_a_child(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment({name: "here/file"}) == {name: str(tmp_path / "here/file")}
    for same in ("", "/there", "~/there"):
        assert environment({name: same}) == {name: same}


@pytest.mark.parametrize("name", SEARCHED)
def test_relative_folders_to_search_are_absolute_for_a_child_and_empty_ones_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment({name: "mine::/there:"}) == {name: f"{tmp_path}/mine:/there"}


def test_where_the_start_folder_is_gone_the_environment_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert environment({"HF_HOME": "here", "PATH": "/usr/bin"}) == {"HF_HOME": "here", "PATH": "/usr/bin"}


@pytest.mark.parametrize("by_file", [True, False], ids=["in the cluster file", "on the command line"])
def test_relative_paths_of_a_cluster_are_absolute_for_its_processes(
    by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "my.toml").write_text(f'[model]\nref = "{"mine" if by_file else "owner/name"}"\n[[stage]]\n')
    given = ClusterOptions(conf="my.toml", model=None if by_file else "mine")
    assert given.elsewhere(given.read()) == ClusterOptions(conf=str(tmp_path / "my.toml"), model=str(tmp_path / "mine"))


@pytest.mark.parametrize("model", ["owner/name", demo.NAME, None])
def test_what_is_no_folder_and_the_packaged_cluster_file_stay_as_they_are(
    model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's name is no folder, even where there is one called so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / demo.NAME).mkdir()
    given = ClusterOptions(model=model)
    conf = given.read()
    assert conf.model.ref == model or model is None
    assert given.elsewhere(conf) == given
    assert local_folder(conf.model.ref) is None
