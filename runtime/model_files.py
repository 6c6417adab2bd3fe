"""The files of a model's folder, each opened in one way: what stands in a file's place and is not
the file (a dangling link, a pointer of Git LFS, a folder) is named as that."""

import os
import stat
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError

GIT_LFS: Final = b"version https://git-lfs"
MOST_BYTES: Final = 1 << 30
"""The largest file that is read whole: weights are read by parts."""


def open_model_file(file: Path) -> int:
    """Return a descriptor for reading a regular file, or a link to one; the caller closes it.
    ZrtError bad_model: the file cannot be read, or is a pointer of Git LFS."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        link = f" (a link to {os.readlink(file)})" if file.is_symlink() else ""
        raise ZrtError("bad_model", f"cannot read {file}{link}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ZrtError("bad_model", f"cannot read {file}: it is not a regular file")
        if os.pread(descriptor, len(GIT_LFS), 0) == GIT_LFS:
            text = f"{file} is a pointer of Git LFS and not the file itself: `git lfs pull` gets it"
            raise ZrtError("bad_model", text)
    except OSError as error:
        os.close(descriptor)
        raise ZrtError("bad_model", f"cannot read {file}: {error.strerror}") from error
    except ZrtError:
        os.close(descriptor)
        raise
    return descriptor


def has_model_file(file: Path) -> bool:
    """Return whether the folder has anything by this name, a dangling link too."""
    return os.path.lexists(file)


def read_model_file(file: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file that is there. ZrtError bad_model: it cannot be read, is a pointer
    of Git LFS, or has more than `most` bytes."""
    descriptor = open_model_file(file)
    with open(descriptor, "rb") as opened:
        try:
            data = opened.read(most + 1)
        except OSError as error:
            raise ZrtError("bad_model", f"cannot read {file}: {error.strerror}") from error
    if len(data) > most:
        raise ZrtError("bad_model", f"{file} is larger than {most} bytes")
    return data


def find_model_file(file: Path) -> bytes | None:
    """Return the bytes of a file, as `read_model_file` does; None where there is none by its
    name."""
    return read_model_file(file) if has_model_file(file) else None
