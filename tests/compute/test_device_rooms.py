"""What belongs to one kind of device is imported in that device's room alone."""

import ast
from pathlib import Path

import pytest

import zrt.runtime.compute

COMPUTE = Path(zrt.runtime.compute.__file__).parent
ROOMS = {"triton": "cuda", "numba": "cpu", "llvmlite": "cpu"}


@pytest.mark.parametrize(("package", "room"), ROOMS.items(), ids=ROOMS)
def test_a_compiler_is_imported_in_its_room_alone(package: str, room: str) -> None:
    found = {file.relative_to(COMPUTE).parts[0] for file in COMPUTE.rglob("*.py") if package in _imported(file)}
    assert found == {room}


def test_the_forwards_of_one_device_know_nothing_of_the_other() -> None:
    for room, other in (("cpu", "compute.cuda"), ("cuda", "compute.cpu")):
        for file in (COMPUTE / room).rglob("*.py"):
            assert other not in file.read_text(), file


def _imported(file: Path) -> set[str]:
    """Return the packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
