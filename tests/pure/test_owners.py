"""Whoever owns a state writes it: in the coordinator no module changes what an object of another
module's class keeps; it calls a method of the owner."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import zrt.actors.coordinator.coordinator

ROOM = Path(zrt.actors.coordinator.coordinator.__file__).parent
CHANGING = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft"})
CHANGING |= {"remove", "setdefault", "sort", "update"}
"""Methods that change a list, a set, a dict or a deque."""


class Owner(NamedTuple):
    """A class that keeps state: the module that defines it, and the names of its attributes."""

    module: str
    name: str
    attributes: frozenset[str]


def owners(module: str, tree: ast.Module) -> Iterator[Owner]:
    """The classes of a module: their fields, and what their methods assign on `self`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            fields |= {
                target.attr
                for target in _targets(node)
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            yield Owner(module, node.name, frozenset(fields))


def foreign_writes(module: str, tree: ast.Module, known: list[Owner]) -> list[str]:
    """What this module changes of objects whose class another module owns.

    An object that a function made itself, or got as an argument, is known by its class; for any
    other the names of its attributes decide.
    """
    by_name = {owner.name: owner for owner in known}
    own = {attribute for owner in known if owner.module == module for attribute in owner.attributes}
    theirs = {attribute for owner in known if owner.module != module for attribute in owner.attributes}
    found = []
    for function in _functions(tree):
        types = _types(function)
        for target in [*_targets(function), *_changed(function)]:
            if not isinstance(target, ast.Attribute) or _is_self(target.value):
                continue
            names = types.get(target.value.id, frozenset()) if isinstance(target.value, ast.Name) else frozenset()
            foreign = any(name in by_name and by_name[name].module != module for name in names)
            if foreign or (not names and target.attr in theirs - own):
                found.append(f"{module}:{target.lineno}: {ast.unparse(target)}")
    return sorted(set(found))


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _targets(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned, augmented or deleted; of `x.y[z] = …` that is `x.y`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
                targets = [target]
            case _:
                continue
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets = [*targets, *target.elts]
            elif isinstance(target, ast.Subscript | ast.Starred):
                targets = [*targets, target.value]
            else:
                yield target


def _changed(tree: ast.AST) -> Iterator[ast.expr]:
    """The `x.y` of each `x.y.append(…)` and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            yield node.func.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _types(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, frozenset[str]]:
    """The classes of arguments and local variables, by their annotations and constructors."""
    types: dict[str, frozenset[str]] = {}
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None:
            types[argument.arg] = _names(argument.annotation)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=made))) if made[:1].isupper():
                types[name] = frozenset({made})
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                types[name] = _names(annotation)
    return types


def _names(annotation: ast.expr) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(annotation) if isinstance(node, ast.Name))


def read() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOM)): ast.parse(path.read_text()) for path in sorted(ROOM.rglob("*.py"))}


def test_no_module_of_the_coordinator_writes_what_another_owns() -> None:
    trees = read()
    known = [owner for module, tree in trees.items() for owner in owners(module, tree)]
    assert [line for module, tree in trees.items() for line in foreign_writes(module, tree, known)] == []


def test_the_owners_are_known_with_their_attributes() -> None:
    trees = read()
    known = {owner.name: owner for module, tree in trees.items() for owner in owners(module, tree)}
    assert {"state", "seat", "serial", "loading"} <= known["ProcessRecord"].attributes
    assert {"epoch", "route", "slot", "credit", "state"} <= known["Session"].attributes
    assert {"fault", "attempts", "filled"} <= known["Generation"].attributes
    assert "closed" in known["Generations"].attributes


@pytest.mark.parametrize(
    "line",
    [
        "record.state = 'ready'",
        "self._roster.find(name).seat, other = None, 1",
        "generation.session.epoch += 1",
        "generation.gaps.append(1.0)",
        "del generation.session.route[0]",
        "generation.session.route[0] = address",
        "for generation.fault in (): pass",
    ],
)
def test_a_foreign_write_is_found(line: str) -> None:
    trees = read()
    known = [owner for module, tree in trees.items() for owner in owners(module, tree)]
    tree = ast.parse(f"def change(self, generation: Generation, record: ProcessRecord, name):\n    {line}\n")
    assert len(foreign_writes("sessions/routing.py", tree, known)) == 1
    own = f"def change(self):\n    {line.replace('record', 'self').replace('generation', 'self')}\n"
    if line.startswith("record"):
        assert foreign_writes("fleet/process_record.py", ast.parse(own), known) == []


def test_what_a_function_makes_itself_is_its_own_to_change() -> None:
    trees = read()
    known = [owner for module, tree in trees.items() for owner in owners(module, tree)]
    tree = ast.parse("def tell(self):\n    event = Cluster()\n    event.id = '1'\n    event.sessions.append(2)\n")
    assert foreign_writes("subscribers.py", tree, known) == []
