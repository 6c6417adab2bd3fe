"""What the documentation says that can be checked: paths, links, commands, and the pages that are
written from the code."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from zrt.runtime.cluster import file_loader
from zrt.runtime.cluster.file_schema import Conf

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
TOP = ("actors", "bench", "conf", "docs", "runtime", "tests", "tui")
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP)})/[\w./-]*\w/?")
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths(document: Path) -> list[str]:
    """The paths that the document names within backticks."""
    spans = CODE.findall(document.read_text(encoding="utf-8"))
    return [path for span in spans for path in PATH.findall(span)]


def commands(document: Path) -> list[list[str]]:
    """The words of each `zrt` and `make` command in the document's shell blocks, comments left
    out."""
    blocks = BLOCK.findall(document.read_text(encoding="utf-8"))
    lines = "".join(text for language, text in blocks if language == "sh").splitlines()
    split = [shlex.split(line.partition(" < ")[0], comments=True) for line in lines]
    return [words for words in split if words and words[0] in ("zrt", "make")]


# ---- what documents name -------------------------------------------------------------------------


@by_name
def test_every_path_in_backticks_exists(document: Path) -> None:
    assert [path for path in paths(document) if not (ROOT / path).exists()] == []


def test_the_architecture_names_files() -> None:
    """Or the test above would hold for a page whose paths are written otherwise."""
    assert len(set(paths(ROOT / "docs" / "architecture.md"))) > 80


@by_name
def test_links_lead_to_files_that_are_there(document: Path) -> None:
    """Pictures and files beside the pages too, which the site's own build does not look for."""
    links = [link.partition("#")[0] for link in LINK.findall(document.read_text(encoding="utf-8"))]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_the_sites_navigation_has_every_page_once() -> None:
    def leaves(entries: list[object]) -> list[str]:
        found = []
        for entry in entries:
            assert isinstance(entry, dict)
            for value in entry.values():
                found += leaves(value) if isinstance(value, list) else [value]
        return found

    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(leaves(settings["project"]["nav"])) == [page.name for page in PAGES]


# ---- commands ------------------------------------------------------------------------------------


@by_name
def test_every_command_is_one(reference: ModuleType, document: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands(document):
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        else:
            reference.parser().parse_args(words[1:])  # it would exit


@by_name
def test_every_cluster_file_is_toml_and_every_script_is_python(document: Path) -> None:
    for language, text in BLOCK.findall(document.read_text(encoding="utf-8")):
        if language == "python":
            compile(text, document.name, "exec")
        elif language == "toml":
            conf = text if "[model]" in text else f'[model]\nref = "m"\n{text}'
            file_loader.parse(conf, document.name)


def test_the_readme_shows_what_people_do() -> None:
    shown = {words[1] for words in commands(ROOT / "README.md")}
    assert {"demo", "test", "up", "chat", "generate", "check", "worker", "top", "drain", "undrain", "down"} <= shown


def test_the_readme_is_short_and_wrapped() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    fenced, long = False, []
    for line in lines:
        fenced ^= line.startswith("```")
        if len(line) > 100 and not fenced and not line.startswith("|"):
            long.append(line)
    assert len(lines) <= 150
    assert long == []


# ---- pages that are written from the code --------------------------------------------------------


@pytest.mark.parametrize("page", ["cluster-file.md", "command-line.md"])
def test_the_reference_pages_are_up_to_date(reference: ModuleType, page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == reference.pages()[page], "run: .venv/bin/python docs/reference.py"


def test_every_table_and_key_of_a_cluster_file_has_its_row(reference: ModuleType) -> None:
    tables = {kind.__name__ for kind in reference.TABLES.values()}
    for field in msgspec.structs.fields(Conf):
        kinds = re.findall(r"file_schema\.(\w+)", str(field.type))
        assert set(kinds) <= tables, field.name
    for heading, kind in reference.TABLES.items():
        section = reference.cluster_file().partition(f"### `{heading}`\n")[2].partition("\n### ")[0]
        rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+\. \|$", section, re.MULTILINE)
        assert rows == [field.name for field in msgspec.structs.fields(kind)], heading
        assert section.partition("|")[0].strip(), heading


def test_every_command_has_its_section(reference: ModuleType) -> None:
    text = reference.command_line()
    for name in ("up", "generate", "chat", "top", "status", "worker", "actor block-server"):
        assert f"### `zrt {name}`\n" in text
    assert "`--temperature T`" in text.partition("### `zrt generate`")[2].partition("###")[0]
