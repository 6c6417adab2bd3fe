"""Files of several processes: replaced whole, and locked by one at a time."""

import fcntl
import os
from pathlib import Path

import pytest

from zrt.runtime.whole_files import locked, write_whole


@pytest.mark.parametrize("flushed", [False, True], ids=["", "flushed"])
@pytest.mark.parametrize("fails", ["replace", "fsync", None])
def test_a_file_is_written_whole_or_left_as_it_was(
    fails: str | None, flushed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if fails is not None:
        monkeypatch.setattr(os, fails, failing)
    if fails is None or (fails == "fsync" and not flushed):
        write_whole(file, b"new", flushed=flushed)
        assert file.read_bytes() == b"new"
    else:
        with pytest.raises(OSError, match="No space left"):
            write_whole(file, b"new", flushed=flushed)
        assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_lock_is_one_owners_until_its_block_ends(tmp_path: Path) -> None:
    asked: list[bool] = []

    def given_up() -> bool:
        asked.append(True)
        return len(asked) == 3

    with locked(tmp_path / "lock", 60) as mine:
        assert mine
        with locked(tmp_path / "lock", 60, 0.001, given_up) as second:
            assert not second
        assert len(asked) == 3
        with locked(tmp_path / "lock", 0, 0.001, given_up) as late:
            assert not late
        assert len(asked) == 3  # no patience, so nobody was asked
        with (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with locked(tmp_path / "lock", 0) as again:
        assert again
