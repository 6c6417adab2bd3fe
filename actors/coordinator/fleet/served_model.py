"""The model that a cluster serves: what lay in its folder when the coordinator started. Whoever
loads blocks is compared with that."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.control import Address
from zrt.runtime.models.architecture.spec import ModelSpec
from zrt.runtime.models.checkpoint.identity import config_parts, tensor_parts
from zrt.runtime.models.checkpoint.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex
from zrt.runtime.models.checkpoint.tensor_digests import FileState, TensorDigests

log = logging.getLogger(__name__)


class ServedModel:
    """The identity of the model in `folder`, as it is now, part by part (see checkpoint/identity).

    A tensor's digest is made when somebody has loaded that tensor: one that is loaded on this
    machine is remembered there (`digests`), and is not hashed again. A tensor that is in no file
    here is what the first has who loads it and comes to serve: until then it is claimed.
    """

    def __init__(self, folder: Path, spec: ModelSpec, *, random: bool, digests: TensorDigests) -> None:
        self._digests = digests
        self._pinned = config_parts(spec, random=random)
        self._names: dict[str, str] = {}
        self._claims: dict[str, set[Address]] = {}
        self._lock = Lock()
        self._states: dict[Path, FileState | None] = {}
        self._index: CheckpointIndex | None = None
        if random:
            return
        self._states = {folder / name: FileState.of(folder / name) for name in (SINGLE_FILE, INDEX_FILE)}
        try:
            self._index, spec = CheckpointIndex.open(folder).matched(spec)
        except ZrtError as error:
            log.warning("the first who loads a tensor says what it is: %s", error)
        else:
            self._states |= {file: FileState.of(file) for file in self._index.files if file not in self._states}
        self._names = tensor_parts(spec, 0, spec.num_blocks - 1)

    def differing(self, parts: Mapping[str, str], cancelled: Callable[[], bool], asker: Address) -> list[str]:
        """Return which of these parts of the `asker` are not those of the model. Blocks: may have
        to hash weights.

        ZrtError bad_model: it cannot be told yet, since a file here cannot be read, or another
        claims what differs; cancelled.
        """
        there = [part for part in parts if part not in self._pinned and self._is_here(part)]
        own = self._own(there, cancelled)
        with self._lock:
            self._pinned |= own
            self._drop(asker, parts)  # what it had before
            new = [part for part in parts if part not in self._pinned and part in self._names]
            firsts = {part: parts[part] for part in new if not self._is_here(part)}
            known = self._pinned | firsts
            differing = [part for part, digest in parts.items() if known.get(part) != digest]
            if not differing:
                self._pinned = known
                self._claims |= {part: set() for part in firsts}
                for part in self._claims.keys() & parts.keys():
                    self._claims[part].add(asker)
            claimed = [part for part in differing if part in self._claims]
            if claimed and len(claimed) == len(differing):
                name = min(self._claims[claimed[0]], key=lambda other: other.name).name
                raise ZrtError("bad_model", f"{name} loads another {claimed[0]}, of which no file is here")
        return differing

    def serves(self, asker: Address) -> None:
        """Take for the model's what this process claimed, now that it serves with it."""
        with self._lock:
            self._claims = {part: askers for part, askers in self._claims.items() if asker not in askers}

    def forget(self, asker: Address) -> None:
        """Drop what this process alone claimed: it has failed, or is gone."""
        with self._lock:
            self._drop(asker, list(self._claims))

    def _drop(self, asker: Address, parts: Iterable[str]) -> None:
        for part in self._claims.keys() & set(parts):
            self._claims[part].discard(asker)
            if not self._claims[part]:
                del self._claims[part], self._pinned[part]

    def _own(self, parts: list[str], cancelled: Callable[[], bool]) -> dict[str, str]:
        """Return the digests of those of these parts whose files here are as they were."""
        while self._index is not None and (parts := [part for part in parts if self._is_as_it_was(part)]):
            names = {part: self._index.stored(self._names[part]) for part in parts}
            entries = {name: self._index.entry(name) for name in names.values()}
            try:
                found = self._digests.digests(entries, self._states, cancelled)
            except ZrtError:
                if all(self._is_as_it_was(part) for part in parts):
                    raise
            else:
                return {part: found[name] for part, name in names.items()}
        return {}

    def _file(self, part: str) -> Path | None:
        return None if self._index is None else self._index.file(self._names[part])

    def _is_here(self, part: str) -> bool:
        """Return whether the part's file was here at the start."""
        file = self._file(part) if part in self._names else None
        return file is not None and self._states[file] is not None

    def _is_as_it_was(self, part: str) -> bool:
        """Return whether the part's file is the same now as at the start; or else nobody can tell
        any more what it was."""
        file = self._file(part)
        return file is not None and FileState.of(file) == self._states[file]
