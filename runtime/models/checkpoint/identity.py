"""The identity of a model: a digest of each part of it that decides the numbers that it computes.

Parts are what its config.json comes to, value by value, and the content of each tensor, by the name
under which the decoder uses it. Whoever holds blocks has the parts of those blocks, and two of them
can be compared whatever their blocks, files, machines or ranks. Random weights are their config.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex
from zrt.runtime.models.checkpoint.layout import EMBEDDING, FINAL_NORM, HEAD, blocks_shapes, end_shapes, held_ends
from zrt.runtime.models.checkpoint.tensor_digests import FileState, TensorDigests, changed_meanwhile

CONFIG: Final = "config.json"
UNDECIDING: Final = frozenset({"model_type", "eos_ids", "max_positions"})
"""Fields of a spec that decide no number: what they turn on has fields of its own, or is the
coordinator's alone."""
DRAWN: Final = frozenset({"tied", "init_range"})
"""Fields of a spec that decide numbers of random weights only: files say by themselves what the
head is."""


def config_parts(spec: ModelSpec, *, random: bool) -> dict[str, str]:
    """Return the digest of each value of a spec that decides numbers, by `config.json: FIELD`."""
    left_out = UNDECIDING if random else UNDECIDING | DRAWN
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in left_out}
    del values["blocks"]
    values |= {"rope": [block.rope for block in spec.blocks], "window": [block.window for block in spec.blocks]}
    return {f"{CONFIG}: {name}": hashlib.sha256(repr(value).encode()).hexdigest() for name, value in values.items()}


def tensor_parts(spec: ModelSpec, first: int, last: int) -> dict[str, str]:
    """Return the tensors that blocks first..last, with the model's ends that belong to them,
    compute with: the name in the checkpoint, by the part's. A head has its own part, also where it
    is the embedding."""
    embedding, head = held_ends(spec, first, last)
    parts = {EMBEDDING: EMBEDDING} if embedding else {}
    if head:
        parts |= {FINAL_NORM: FINAL_NORM, HEAD: EMBEDDING if spec.tied else HEAD}
    return parts | {name: name for name in blocks_shapes(spec, first, last)}


@dataclass(frozen=True, slots=True)
class ModelContent:
    """What a process found in a model's `folder` for its blocks: the digest of each of the `parts`,
    the file of each tensor, and the state of all files that were looked at."""

    folder: Path
    parts: Mapping[str, str]
    files: Mapping[str, Path]
    states: Mapping[Path, FileState | None]

    def check_unchanged(self) -> None:
        """Raise ZrtError bad_model unless all files are as they were, so that what was read of them
        meanwhile is what the parts say."""
        for file, state in self.states.items():
            if FileState.of(file) != state:
                raise changed_meanwhile(file)

    def unlike(self, parts: Sequence[str]) -> ZrtError:
        """Return the error that these parts are not those of the model that the cluster serves."""
        by_file: dict[Path, list[str]] = {}
        for part in parts:
            by_file.setdefault(self.files.get(part, self.folder / CONFIG), []).append(part)
        return ZrtError(
            "bad_model",
            f"{_listed(f'{file} ({_brief(of_file)})' for file, of_file in by_file.items())}: "
            "not the model that this cluster serves. Put back what was there when its coordinator was started, "
            "and it is loaded again; or `zrt down` and `zrt up` serve what is there now",
        )


def read_content(
    folder: Path,
    blocks: tuple[int, int],
    *,
    random: bool,
    digests: TensorDigests,
    cancelled: Callable[[], bool],
    hashes: Callable[[int], None] | None = None,
) -> ModelContent:
    """Return what the folder holds of blocks first..last. Hashes tensors that `digests` does not
    know; `cancelled` and `hashes` are those of TensorDigests.digests. ZrtError: as there and
    CheckpointIndex.check."""
    states: dict[Path, FileState | None] = {folder / CONFIG: FileState.of(folder / CONFIG)}
    spec = read_spec(folder)
    parts = config_parts(spec, random=random)
    if random:
        return ModelContent(folder, parts, {}, states)
    states |= {folder / name: FileState.of(folder / name) for name in (SINGLE_FILE, INDEX_FILE)}
    index, spec = CheckpointIndex.open(folder).matched(spec)
    states |= {file: FileState.of(file) for file in index.files if file not in states}
    first, last = blocks
    if last >= spec.num_blocks:
        raise ZrtError("bad_model", f"{folder / CONFIG}: {spec.num_blocks} blocks; blocks {first}-{last} are wanted")
    shapes = end_shapes(spec, *held_ends(spec, first, last)) | blocks_shapes(spec, first, last)
    for name, shape in shapes.items():
        index.check(name, shape)
    names = {part: index.stored(name) for part, name in tensor_parts(spec, first, last).items()}
    entries = {part: index.entry(name) for part, name in names.items()}
    found = digests.digests({names[part]: entry for part, entry in entries.items()}, states, cancelled, hashes)
    parts |= {part: found[name] for part, name in names.items()}
    return ModelContent(folder, parts, {part: entry.file for part, entry in entries.items()}, states)


def folder_state(folder: Path) -> dict[str, FileState | None]:
    """Return the states of all files that say what the model in a folder is."""
    found = [*folder.glob("*.safetensors"), folder / CONFIG, folder / INDEX_FILE]
    return {file.name: FileState.of(file) for file in found}


def _brief(parts: Sequence[str]) -> str:
    """Return what differs in one file, in words."""
    fields_ = [part.removeprefix(f"{CONFIG}: ") for part in parts if part.startswith(CONFIG)]
    if fields_:
        return f"{', '.join(fields_)} {'differs' if len(fields_) == 1 else 'differ'}"
    more = f" and {counted(len(parts) - 1, 'more tensor')}" if len(parts) > 1 else ""
    return f"tensor {parts[0]}{more} {'differ' if more else 'differs'}"


def _listed(items: Iterable[str], most: int = 3) -> str:
    """Return the first items, and how many more there are."""
    every = list(items)
    more = f" and {counted(len(every) - most, 'more file')}" if len(every) > most else ""
    return ", ".join(every[:most]) + more
