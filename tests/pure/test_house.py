"""The house: what may be said of its rooms and names as a whole."""

import ast
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("runtime", "actors", "tui")
MOST_MODULES = 13


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_room_holds_more_modules_than_a_glance_takes_in() -> None:
    sizes = Counter(path.parent.relative_to(ROOT) for path in modules() if path.name != "__init__.py")
    rooms = {str(room): size for room, size in sizes.items() if room.parts[0] != "tui"}
    assert {room: size for room, size in rooms.items() if size > MOST_MODULES} == {}


def test_every_room_is_installed() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {module_name(path) for path in modules() if path.name == "__init__.py"}
    assert set(said) - {"zrt.conf"} == rooms


def test_whoever_imports_a_name_imports_it_from_where_it_is_made() -> None:
    """But for the public names of `zrt.runtime`, and numba's, which may be missing."""
    made = {module_name(path): names_made_in(path) for path in modules()}
    public = {"zrt.runtime", "zrt.runtime.compute.cpu.numba_runtime"}
    elsewhere = []
    for path in [*modules(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in made and node.module not in public:
                for alias in node.names:
                    if alias.name not in made[node.module] and f"{node.module}.{alias.name}" not in made:
                        elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{alias.name}")
    assert elsewhere == []


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("zrt", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def names_made_in(path: Path) -> set[str]:
    """All but what the module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
