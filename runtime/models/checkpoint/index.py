"""The tensors of a model folder, by name: which file holds each, where, and in what form. From
headers alone; imports no torch.

The weights are `model.safetensors`, else the files that `model.safetensors.index.json` names; other
files in the folder are ignored.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import msgspec

from zrt.runtime.errors import Kind, ZrtError
from zrt.runtime.model_files import has_model_file
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.formats.dense import DENSE
from zrt.runtime.models.checkpoint.formats.weight_format import WeightFormat
from zrt.runtime.models.checkpoint.layout import EMBEDDING, HEAD, Shapes, other_name
from zrt.runtime.models.checkpoint.safetensors import (
    SafetensorsHeader,
    ShardIndex,
    TensorEntry,
    read_header,
    read_index,
)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
QUANTISED: Final = re.compile(r"scale|zero_?point|packed|qweight|qzeros|absmax|quant_map|quant_state|g_idx")
"""Parts of tensor names that quantisers store beside a weight, or in its place."""


class Problem(msgspec.Struct, frozen=True):
    """Reason why weights cannot be used; `message` names the tensor or the file."""

    kind: Kind
    message: str


class CheckpointIndex:
    """What a model folder's safetensors files hold. A file's header is read when it is first
    needed, so files of other stages may be absent."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Path],
        index: ShardIndex | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with no header read. `files` says which file each tensor is in: by the index, or
        else by the only file's header.

        `aliases` are tensors that the files hold under another name.
        """
        self.folder = folder
        self._files = files
        self._index = index
        self._aliases = aliases or {}
        self._headers: dict[Path, SafetensorsHeader] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the weights in `folder`. Errors: bad_model when there are none, or their only file
        or their index cannot be used."""
        inventory = cls.survey(folder)
        if inventory._index is None:
            _refuse(inventory.header(folder / SINGLE_FILE).problems)
        else:
            _refuse(inventory._index.problems)
        return inventory

    @classmethod
    def of(cls, files: Iterable[Path]) -> Self:
        """Open the weights in these files, whatever folder they are in. Errors: bad_model when a
        file cannot be used, or two files hold the same tensor."""
        headers = {file: read_header(file) for file in files}
        holders: dict[str, Path] = {}
        for file, header in headers.items():
            _refuse(header.problems)
            for name in header.tensors:
                if name in holders:
                    raise ZrtError("bad_model", f"tensor {name} is in {holders[name]} and in {file}")
                holders[name] = file
        inventory = cls(next(iter(headers), Path()).parent, holders)
        inventory._headers = headers
        return inventory

    @classmethod
    def survey(cls, folder: Path) -> Self:
        """Open the weights in `folder`, however broken: `problems` lists what is broken. Errors:
        bad_model only when there are no weights."""
        single, index_file = folder / SINGLE_FILE, folder / INDEX_FILE
        if has_model_file(single):
            header = read_header(single)
            inventory = cls(folder, dict.fromkeys([*header.tensors, *header.damaged], single))
            inventory._headers[single] = header
            return inventory
        if has_model_file(index_file):
            index = read_index(index_file)
            return cls(folder, index.files, index)
        raise ZrtError(
            "bad_model", f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{_instead(folder)}"
        )

    def names(self) -> list[str]:
        """Return every tensor that the files, or their index, say they hold."""
        return sorted(self._files)

    @property
    def files(self) -> list[Path]:
        """Files that hold weights, whether they are there or not."""
        found = sorted(set(self._files.values()))
        return found or [self.folder / SINGLE_FILE] if self._index is None else found

    def header(self, file: Path) -> SafetensorsHeader:
        """Return the header of one of `files`."""
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    def stored(self, name: str) -> str:
        """Return the files' name of tensor `name`, which may be that of a base model's
        checkpoint."""
        name = self._aliases.get(name, name)
        other = other_name(name)
        return other if self._names(other) and not self._names(name) else name

    def _names(self, name: str) -> bool:
        """Return whether the files, or their index, name this tensor, though it may be damaged."""
        return name in self._files or (self._index is not None and name in self._index.damaged)

    def file(self, name: str) -> Path | None:
        """Return the file that tensor `name` is said to be in, whether it is there or not; None: it
        is in no file."""
        return self._files.get(self.stored(name))

    def find(self, name: str) -> TensorEntry | None:
        """Return where tensor `name` lies, if it is there, though its file may be broken elsewhere;
        else None."""
        file = self.file(name)
        return None if file is None else self.header(file).tensors.get(self.stored(name))

    def entry(self, name: str) -> TensorEntry:
        """Return where tensor `name` lies. Errors: bad_model unless it is there, in a file that is
        whole."""
        file = self.file(name)
        if file is not None:
            _refuse(self.header(file).problems)
        entry = self.find(name)
        if entry is None:
            raise ZrtError("bad_model", f"tensor {self.stored(name)} {self._missing(self.stored(name))}")
        return entry

    def weight_format(self, name: str) -> WeightFormat:
        """Return the format that tensor `name`, which `check` has accepted, is stored in."""
        return DENSE[self.entry(name).dtype]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise `bad_model` or `unsupported` unless tensor `name` is there, whole, in this shape
        and a dtype that can be read."""
        name = self.stored(name)
        file = self._files.get(name)
        if file is not None:
            _refuse(self.header(file).problems)
        wrong = self._wrong(name, shape)
        if wrong is not None:
            raise ZrtError(wrong.kind, f"tensor {name} {wrong.message}")

    def matched(self, spec: ModelSpec) -> tuple[Self, ModelSpec]:
        """Return this index and `spec` as they fit together where the head is tied to the
        embedding. As in transformers, files with a head besides the embedding have that head, and
        files with the head alone have it for the embedding, too."""
        if not spec.tied or not self._names(self.stored(HEAD)):
            return self, spec
        if self._names(self.stored(EMBEDDING)):
            return self, replace(spec, tied=False)
        twin = type(self)(self.folder, self._files, self._index, {EMBEDDING: HEAD})
        twin._headers = self._headers
        return twin, spec

    def problems(self, shapes: Shapes) -> list[Problem]:
        """Return all that keeps the tensors of `shapes` from being read. Looks into every file;
        reads no data."""
        found = [Problem("bad_model", message) for message in (self._index.problems if self._index else ())]
        for file in self.files:
            found += [Problem("bad_model", message) for message in self.header(file).problems]
        wrong: dict[Problem, list[str]] = {}
        for name, shape in {self.stored(name): shape for name, shape in shapes.items()}.items():
            if not self._is_blamed(name):
                for complaint in filter(None, (self._wrong(name, shape), self._ambiguous(name))):
                    wrong.setdefault(complaint, []).append(name)
        for complaint, names in wrong.items():
            found += [Problem(complaint.kind, f"tensor {name} {complaint.message}") for name in _brief(names)]
        return found

    def _is_blamed(self, name: str) -> bool:
        """Return whether a problem of the tensor's file, or of the index, explains already why the
        tensor is not there."""
        if self._index is not None and (not self._index.readable or name in self._index.damaged):
            return True
        file = self._files.get(name)
        if file is None:
            return self._index is None and not self.header(self.folder / SINGLE_FILE).readable
        header = self.header(file)
        return not header.readable or name in header.damaged

    def _wrong(self, name: str, shape: Sequence[int]) -> Problem | None:
        """Return what is wrong with a tensor, in words that follow its name; None if nothing is."""
        module = name.rpartition(".")[0]
        if module in self._quantised:
            beside = self._quantised[module]
            return Problem(
                "unsupported", f"is quantised ({beside} is stored with it); only plain weights are supported"
            )
        file = self._files.get(name)
        entry = None if file is None else self.header(file).tensors.get(name)
        if entry is None:
            return Problem("bad_model", self._missing(name))
        weights = DENSE.get(entry.dtype)
        stored = tuple(shape) if weights is None else weights.stored(shape)[""][1]
        if entry.shape != stored:
            return Problem("bad_model", f"in {entry.file} is {list(entry.shape)}, not {list(stored)}")
        if weights is None:
            return Problem("bad_model", f"in {entry.file} is {entry.dtype}, not {', '.join(DENSE)}")
        return None

    def _missing(self, name: str) -> str:
        file = self._files.get(name)
        holders = [str(other) for other in self.files if other != file and name in self.header(other).tensors]
        there = f"; it is in {' and in '.join(holders)}" if holders else ""
        if file is not None:
            return f"is missing from {file}, where {INDEX_FILE} says it is{there}"
        if holders:
            return f"is not in {INDEX_FILE}{there}"
        return f"is missing from the checkpoint in {self.folder}"

    def _ambiguous(self, name: str) -> Problem | None:
        """Return a problem if a file other than the index's holds the tensor as well, so that
        nothing tells which of the two is right; else None."""
        file = self._files.get(name)
        others = [str(other) for other in self.files if other != file and name in self.header(other).tensors]
        if file is None or name not in self.header(file).tensors or not others:
            return None
        return Problem(
            "bad_model", f"is in {file}, where {INDEX_FILE} says it is, but also in {' and in '.join(others)}"
        )

    @cached_property
    def _quantised(self) -> Mapping[str, str]:
        """Return the modules whose weight is quantised, each with the name, within the module, of a
        tensor that shows it."""
        found = {}
        for name in self._files:
            module, _, part = name.rpartition(".")
            if QUANTISED.search(part):
                found[module.removesuffix(".weight")] = part
        return found


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more: `zrt check` lists them)" if len(problems) > 1 else ""
        raise ZrtError("bad_model", problems[0] + more)


def _instead(folder: Path) -> str:
    """Return what a folder without weights has that looks like weights."""
    kinds = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
    names = sorted(path.name for kind in kinds for path in folder.glob(kind))
    if not names:
        return ""
    return f" (there is {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}, which zrt does not read)"


def _brief(names: Iterable[str]) -> list[str]:
    """Return names of tensors, with names that differ in nothing but the block written as one:
    `model.layers.{0-3,7}.mlp.up_proj.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        before, after = (match[1], match[3]) if match else (name, "")
        groups.setdefault((before, after), []).extend([int(match[2])] if match else [])
    return [f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in groups.items()]


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) + "}"
