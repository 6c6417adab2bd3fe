"""Each room's docstring lists what is in the room."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.parent for top in ("actors", "runtime", "tui") for path in (ROOT / top).rglob("__init__.py"))
ENTRY = re.compile(r"^- (\w+\.py|\w+/): \S", re.MULTILINE)


def contents(room: Path) -> list[str]:
    files = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    return sorted(files + [f"{path.parent.name}/" for path in room.glob("*/__init__.py")])


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_rooms_docstring_lists_its_files_and_no_others(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert sorted(ENTRY.findall(docstring)) == contents(room)
    assert "ay import" in docstring
