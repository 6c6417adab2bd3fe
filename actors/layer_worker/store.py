"""The store of the layers that a worker was sent: the files of one manifest (layer_manifest.py), in
a folder of the worker's cache.

A file is taken chunk by chunk, under a temporary name until all its pieces are checked and on disk.
What an earlier push left is hashed again: whole files before they are first read. A file that
differs from the manifest is removed, to be sent again. Workers of one machine may share a cache,
and be sent the same files at once.
"""

import hashlib
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from zrt.actors.layer_worker.store_files import (
    PartialFile,
    damage_of,
    fault_of,
    known_manifest,
    lost_files,
    sound_bytes,
    unusable,
)
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.checkpoint.layer_manifest import (
    HASHERS,
    MANIFEST,
    PIECE_BYTES,
    Manifest,
    ManifestFile,
    digest,
    parse_manifest,
)
from zrt.runtime.whole_files import write_whole

_HASH: Final = re.compile(r"[0-9a-f]{64}")


class LayerStore:
    """The files of one `model_hash`, in a folder of their own under `root`. ZrtError bad_request
    for a hash that is none.

    Failures to write or read are insufficient_memory where the disk is full, worker_failed where
    files that were held are gone or damaged (they are to be sent again), and bad_config for all
    else: the folder cannot be used.

    One thread uses the store, and closes it. Two threads of its own write: one the chunk that is
    being hashed, one brings whole files to disk.
    """

    def __init__(self, root: Path, model_hash: str) -> None:
        if not _HASH.fullmatch(model_hash):
            raise ZrtError("bad_request", f"model_hash: expected 64 hex digits, got {model_hash[:80]!r}")
        self.model_hash = model_hash
        self._folder = root / model_hash
        self.manifest = known_manifest(self._folder)
        self._parts: dict[str, PartialFile] = {}
        self._sound: set[str] = set()  # whole files whose bytes this process has checked
        self._promised: set[str] = set()  # files that the master was told are held: it will not send them again
        self._disk = ThreadPoolExecutor(2, "disk")
        self._finishing: list[tuple[str, Future[None]]] = []

    def close(self) -> None:
        """Take nothing more, and finish what is being written."""
        self._disk.shutdown(wait=False)

    @property
    def complete(self) -> bool:
        """Whether all files are whole and on disk. ZrtError: some could not be written."""
        self._settle()
        if self.manifest is None or not all(self._whole(file) for file in self.manifest.files):
            return False
        self._promised.update(file.name for file in self.manifest.files)
        return True

    def files(self, *, anew: bool = False) -> list[Path]:
        """Return the paths of the files, each checked against the manifest; with `anew` also those
        that were checked before. ZrtError bad_request: some are not complete yet; worker_failed:
        some are gone, cut off, damaged or cannot be read, and have to be sent again; or why some
        could not be written to disk."""
        self._settle()
        if anew:
            self._sound.clear()
        listed = self.manifest.files if self.manifest is not None else []
        lacking = {file.name: why for file in listed if (why := fault_of(self._folder / file.name, file))}
        if not listed or not self._promised.issuperset(lacking):
            raise ZrtError("bad_request", f"the files of {self.model_hash[:12]} are not complete")
        if lacking:
            for name in lacking:
                self._parts.pop(name, None)
                self._sound.discard(name)
            raise lost_files(self._folder, lacking)
        unknown = [file for file in listed if file.name not in self._sound]
        with ThreadPoolExecutor(HASHERS, "hash") as pool:
            found = zip(unknown, pool.map(lambda file: damage_of(self._folder / file.name, file), unknown), strict=True)
            damaged = [(file, why) for file, why in found if why]
        for file, _ in damaged:
            self._discard(file)
        if damaged:
            raise lost_files(self._folder, {file.name: why for file, why in damaged})
        self._sound.update(file.name for file in unknown)
        return [self._folder / file.name for file in listed]

    def _settle(self) -> None:
        """Wait for the files that are being brought to disk. ZrtError: the first failure."""
        finishing, self._finishing = self._finishing, []
        failed = {name: error for name, done in finishing if (error := done.exception()) is not None}
        for name in failed:
            self._parts.pop(name, None)  # what is there is looked at anew
        for error in failed.values():
            raise error

    def take(self, name: str, offset: int, total: int, data: bytes | memoryview) -> int:
        """Write a chunk, which ends at the end of a piece or before; return how many bytes of the
        file are then held, from its start on. An empty chunk only asks for that number.

        ZrtError bad_request: no such file, a wrong total, an offset other than the bytes held, more
        bytes than the piece has, or a piece that differs from the manifest; or why the chunk could
        not be written. The whole pieces held before stay held.
        """
        try:
            if name == MANIFEST:
                return self._take_manifest(offset, total, data)
            held = self._take_chunk(self._listed(name, total), offset, data)
        except OSError as error:
            raise unusable(self._folder / name, error) from None
        if held == total:
            self._promised.add(name)
        return held

    def _take_manifest(self, offset: int, total: int, data: bytes | memoryview) -> int:
        if len(data) == 0:
            return total if self.manifest is not None else 0
        if offset != 0 or len(data) != total:
            raise ZrtError(
                "bad_request", f"{MANIFEST}: expected it in one piece, got {len(data)} of {total} at {offset}"
            )
        if digest(data) != self.model_hash:
            raise ZrtError("bad_request", f"{MANIFEST}: its hash is not {self.model_hash}")
        manifest = parse_manifest(data)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / MANIFEST, data, flushed=True)
        self.manifest = manifest
        self._adopt(manifest)
        return total

    def _adopt(self, manifest: Manifest) -> None:
        """Take over files that other offers brought: layers are given out anew when a worker is
        lost, and files already sent are not sent again.

        A file becomes a link, or a link to its first part where the whole is not there yet, and is
        checked like any other. A worker that is being sent the same file writes the same bytes
        there.
        """
        wanted = {file for file in manifest.files if not self._whole(file)}
        for folder in self._folder.parent.iterdir():
            if not wanted or folder == self._folder or not _HASH.fullmatch(folder.name):
                continue
            known = known_manifest(folder)
            for file in wanted.intersection(known.files if known is not None else ()):
                partial = self._partial(file)
                for name in (file.name, partial.name):
                    with suppress(OSError):  # it is not there, or is here
                        os.link(folder / name, self._folder / name)
            wanted = {file for file in wanted if not self._whole(file)}

    def _listed(self, name: str, total: int) -> ManifestFile:
        if self.manifest is None:
            raise ZrtError("bad_request", f"{MANIFEST} comes before {name[:80]!r}")
        file = next((file for file in self.manifest.files if file.name == name), None)
        if file is None:
            raise ZrtError("bad_request", f"{name[:80]!r} is no file of the manifest")
        if total != file.size:
            raise ZrtError("bad_request", f"{name}: {total} bytes in all, the manifest says {file.size}")
        return file

    def _take_chunk(self, file: ManifestFile, offset: int, data: bytes | memoryview) -> int:
        if len(data) == 0:
            return self._found(file).held
        part = self._parts.get(file.name) or self._found(file)
        room = min(PIECE_BYTES - part.held % PIECE_BYTES, file.size - part.held)
        if offset != part.held or len(data) > room:
            text = f"{file.name}: expected at most {room} bytes at {part.held}, got {len(data)} at {offset}"
            raise ZrtError("bad_request", text)
        piece, number = len(data) == room, part.held // PIECE_BYTES
        written = self._disk.submit(self._write, file, offset, data)
        part.take(data)
        try:
            written.result()
            if piece and part.hash.hexdigest() != file.pieces[number]:
                text = (
                    f"{file.name}: the bytes from {number * PIECE_BYTES} to {part.held} are not those of the manifest"
                )
                raise ZrtError("bad_request", text)
        except FileNotFoundError:
            del self._parts[file.name]  # or else another worker was sent it as well, and was faster
            raise
        except BaseException:
            part.cut()
            raise
        if piece:
            part.hash = hashlib.sha256()
        if part.held == file.size:
            self._finishing.append((file.name, self._disk.submit(self._finish, file)))
        return part.held

    def _write(self, file: ManifestFile, offset: int, data: bytes | memoryview) -> None:
        begins = 0 if offset else os.O_CREAT  # what was taken before is there, or else there would be a hole
        descriptor = os.open(self._partial(file), os.O_WRONLY | os.O_CLOEXEC | begins, 0o666)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + done)
        finally:
            os.close(descriptor)

    def _finish(self, file: ManifestFile) -> None:
        """Bring a file whose bytes are all there and checked to disk, under its own name."""
        partial = self._partial(file)
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, file.size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.replace(self._folder / file.name)
        except FileNotFoundError:
            return  # another worker was sent the same, and was faster; or it is gone, and does not count as held
        except OSError as error:
            raise unusable(partial, error) from None
        if file.name in self._parts:
            self._sound.add(file.name)

    def _found(self, file: ManifestFile) -> PartialFile:
        """Return the held part of a file: the part this process took itself, as long as that is
        there; otherwise the whole pieces of an earlier push."""
        part = self._parts.get(file.name)
        if part is None or self._there(file) < part.held:
            part = self._parts[file.name] = PartialFile(self._checked(file), hashlib.sha256())
        return part

    def _there(self, file: ManifestFile) -> int:
        """Return how many bytes of a file are on disk, checked or not."""
        if self._whole(file):
            return file.size
        try:
            return self._partial(file).stat().st_size
        except FileNotFoundError:
            return 0

    def _checked(self, file: ManifestFile) -> int:
        """Return how many bytes the whole pieces of a begun file have; a piece that the disk lost a
        part of does not count."""
        if self._whole(file):
            return file.size
        try:
            held = sound_bytes(self._partial(file), file)
        except FileNotFoundError:
            return 0
        if held == file.size:
            self._finish(file)
        return held

    def _whole(self, file: ManifestFile) -> bool:
        """Return whether a file is there, and has its full size."""
        return not fault_of(self._folder / file.name, file)

    def _discard(self, file: ManifestFile) -> None:
        self._parts.pop(file.name, None)
        try:
            (self._folder / file.name).unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self._folder / file.name, error) from None

    def _partial(self, file: ManifestFile) -> Path:
        return self._folder / f"{file.name}.part"
