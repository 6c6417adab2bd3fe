"""Digests of tensors: each is hashed once a machine, as long as its file stays as it is.

The digest of a tensor is the SHA-256 of its dtype, its shape and the SHA-256 of every PIECE_BYTES
of its bytes, so that one tensor is hashed by several threads, and is the same whichever file, at
whichever place, holds it. What was hashed is remembered in a folder, a JSON file for each file of
weights, by that file's path, size, times and inode: nothing but the kernel sets ctime, so bytes
that change with size and mtime kept are seen. Not seen is a write beneath the file system, or with
the clock set back to the very same nanosecond.

Processes share the folder: whoever adds to a file of it replaces the file whole, one at a time, and
of those that want the same tensors at once, one hashes and the others wait.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size
from zrt.runtime.model_files import open_model_file
from zrt.runtime.models.checkpoint.layer_manifest import PIECE_BYTES, READ_BYTES
from zrt.runtime.models.checkpoint.safetensors import TensorEntry
from zrt.runtime.paths import home
from zrt.runtime.whole_files import locked, write_whole

log = logging.getLogger(__name__)

HASHERS: Final = 8
"""The most threads that hash at once, if there are so many cores."""
SETTLED_S: Final = 2.0
"""How long a file must have been left alone for its digests to be remembered: a clock that ticks
coarsely gives two writes the same time."""
LOCK_S: Final = 1.0
"""How long to wait for whoever else adds to what is remembered; after that nothing is added."""
TURN_S: Final = 120.0
"""How long to wait for a process that hashes the same tensors, as a replica does."""
TURNS: Final = 64
"""Files by which processes wait for each other; of two that share one, one waits in vain."""
MOST_FILES: Final = 1024
"""Files of weights that are remembered; those hashed longest ago make room."""


class FileState(NamedTuple):
    """What the file system says of a file; equal states mean equal bytes. `times` are mtime and
    ctime, in nanoseconds."""

    inode: int
    size: int
    times: tuple[int, int]

    @classmethod
    def of(cls, file: Path | int) -> "FileState | None":
        """Return the state of a file, or of an open descriptor; None: there is no such file."""
        try:
            found = os.stat(file)
        except OSError:
            return None
        return cls(found.st_ino, found.st_size, (found.st_mtime_ns, found.st_ctime_ns))


class RememberedFile(msgspec.Struct):
    """The digests of a file's tensors by name, in the `state` that the file had."""

    file: str
    state: FileState
    tensors: dict[str, str]


class TensorDigests:
    """The digests of tensors in safetensors files, those remembered in `folder` (None: in zrt's own
    on this machine) and new ones."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = home() / "digests" if folder is None else folder

    def digests(
        self,
        tensors: Mapping[str, TensorEntry],
        states: Mapping[Path, FileState | None],
        cancelled: Callable[[], bool],
        hashes: Callable[[int], None] | None = None,
    ) -> dict[str, str]:
        """Return the digest of each tensor, by its name in the files, as 64 hex digits. `states`
        are those of the files from before their headers were read. Blocks while it hashes what is
        not remembered; `hashes` is told how many bytes that are.

        ZrtError bad_model: a file is in another state by now, or cannot be read; cancelled.
        """
        found: dict[str, str] = {}
        missing: dict[Path, dict[str, TensorEntry]] = {}
        for file in {entry.file for entry in tensors.values()}:
            known = self._remembered(file, states[file])
            of_file = {name: entry for name, entry in tensors.items() if entry.file == file}
            found |= {name: known[name] for name in of_file if name in known}
            missing[file] = {name: entry for name, entry in of_file.items() if name not in known}
        nbytes = sum(entry.nbytes for of_file in missing.values() for entry in of_file.values())
        if not nbytes:
            return found
        if hashes is not None:
            hashes(nbytes)
        began, workers = time.monotonic(), min(HASHERS, len(os.sched_getaffinity(0)))
        with _pool(workers) as pool:
            for file, of_file in missing.items():
                if of_file:
                    with self._turn(file, of_file, cancelled):
                        found |= self._hashed_or_waited_for(file, states[file], of_file, pool, cancelled)
        pace = nbytes / 1e9 / max(1e-9, time.monotonic() - began)
        log.info("hashed %s of weights, %.2f GB/s in %d threads", byte_size(nbytes), pace, workers)
        return found

    def _hashed_or_waited_for(
        self,
        file: Path,
        state: FileState | None,
        tensors: Mapping[str, TensorEntry],
        pool: ThreadPoolExecutor,
        cancelled: Callable[[], bool],
    ) -> dict[str, str]:
        """Return the digests of tensors of one file, some of which another process may have hashed
        since they were missed."""
        known = self._remembered(file, state)
        missing = {name: entry for name, entry in tensors.items() if name not in known}
        new = _hashed(file, state, missing, pool, cancelled) if missing else {}
        self._remember(file, state, new)
        return {name: new[name] if name in new else known[name] for name in tensors}

    @contextmanager
    def _turn(self, file: Path, names: Iterable[str], cancelled: Callable[[], bool]) -> Iterator[None]:
        """Let one process at a time hash these tensors, for the length of the block; all at once
        where the folder cannot be written."""
        number = int.from_bytes(hashlib.sha256(" ".join([str(file), *sorted(names)]).encode()).digest()) % TURNS
        with ExitStack() as stack:
            with suppress(OSError):
                (self._folder / "turns").mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._folder / "turns" / str(number), TURN_S, given_up=cancelled))
            yield

    def _place(self, file: Path) -> Path:
        """Return where the digests of a file of this machine are remembered: a home may be shared
        by many."""
        whose = os.fsencode(socket.gethostname()) + os.fsencode(file.resolve())
        return self._folder / f"{hashlib.sha256(whose).hexdigest()[:32]}.json"

    def _remembered(self, file: Path, state: FileState | None) -> dict[str, str]:
        """Return the digests that are remembered of a file in this state."""
        try:
            found = msgspec.json.decode(self._place(file).read_bytes(), type=RememberedFile)
        except (OSError, ValueError):
            return {}
        return found.tensors if found.state == state and found.file == str(file.resolve()) else {}

    def _remember(self, file: Path, state: FileState | None, tensors: Mapping[str, str]) -> None:
        """Add digests to those remembered of a file, unless it was changed a moment ago. They are
        only not remembered where that fails."""
        if not tensors or state is None or time.time() - state.times[1] / 1e9 < SETTLED_S:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / "lock", LOCK_S) as held:
                if held:
                    known = {**self._remembered(file, state), **tensors}
                    text = msgspec.json.encode(RememberedFile(str(file.resolve()), state, known))
                    write_whole(self._place(file), text)
                    self._forget_oldest()
        except OSError as error:
            log.warning("digests of weights are not kept, and made anew at each start: %s", error)

    def _forget_oldest(self) -> None:
        places = list(self._folder.glob("*.json"))
        if len(places) > MOST_FILES:
            places.sort(key=lambda place: place.stat().st_mtime)
            for place in places[: len(places) - MOST_FILES]:
                place.unlink(missing_ok=True)


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads; what it has not begun when the block ends is dropped."""
    pool = ThreadPoolExecutor(workers, "hash")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _hashed(
    file: Path,
    state: FileState | None,
    tensors: Mapping[str, TensorEntry],
    pool: ThreadPoolExecutor,
    cancelled: Callable[[], bool],
) -> dict[str, str]:
    """Return the digests of tensors of one file, hashed by the pool."""
    descriptor = open_model_file(file)
    try:
        _check(file, state, FileState.of(descriptor))
        pieces = {
            name: [
                pool.submit(_piece, file, descriptor, entry.begin + at, min(PIECE_BYTES, entry.nbytes - at), cancelled)
                for at in range(0, entry.nbytes, PIECE_BYTES)
            ]
            for name, entry in tensors.items()
        }
        try:
            found = {name: _digest(tensors[name], [piece.result() for piece in made]) for name, made in pieces.items()}
        finally:
            for piece in (piece for made in pieces.values() for piece in made):
                if not piece.cancel():
                    piece.exception()  # it reads from the descriptor until then
        _check(file, state, FileState.of(descriptor))
        _check(file, state, FileState.of(file))
    finally:
        os.close(descriptor)
    return found


def _check(file: Path, before: FileState | None, now: FileState | None) -> None:
    if before is None or now != before:
        raise changed_meanwhile(file)


def changed_meanwhile(file: Path) -> ZrtError:
    """Return the error for a file that somebody writes while it is loaded."""
    return ZrtError("bad_model", f"{file} was changed while it was loaded; once it is whole, it is loaded again")


def _piece(file: Path, descriptor: int, begin: int, size: int, cancelled: Callable[[], bool]) -> bytes:
    """Return the SHA-256 of a piece of a file. ZrtError bad_model, cancelled."""
    found, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, size)))
    done = 0
    while done < size:
        if cancelled():
            raise ZrtError("cancelled", f"hashing {file} was stopped")
        try:
            count = os.preadv(descriptor, [buffer[: size - done]], begin + done)
        except OSError as error:
            raise ZrtError("bad_model", f"cannot read {file}: {error.strerror}") from error
        if not count:
            raise ZrtError("bad_model", f"{file} is cut off: it ended while it was read")
        found.update(buffer[:count])
        done += count
    return found.digest()


def _digest(entry: TensorEntry, pieces: Sequence[bytes]) -> str:
    found = hashlib.sha256(f"{entry.dtype} {list(entry.shape)} ".encode())
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()
