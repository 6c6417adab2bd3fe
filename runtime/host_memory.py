"""The memory of this machine that a new process may take: what the kernel reports, within the
limits of control groups."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
RECLAIMED: Final = ("inactive_file", "active_file", "slab_reclaimable")
"""The names in memory.stat of what a control group is charged for, but the kernel takes back when
memory is asked for."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be had without swapping: MemAvailable, or less where a control
    group of this process has less left.

    Sources: proc(5), cgroups(7); version 2 groups are limited by memory.max and memory.high,
    version 1 by memory.limit_in_bytes. `root` is where the file system begins.
    """
    return max(0, min([_mem_available(root), *_groups(root)]))


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this machine."""
    return _table((root / "proc/meminfo").read_text(), ":")["MemTotal"] * 1024


def resident_memory(pid: int | None = None) -> int:
    """Return the resident memory, in bytes, of process `pid`, by default this one; 0 if there is no
    such process or it cannot be looked up."""
    try:
        with open(f"/proc/{pid or 'self'}/statm", "rb", buffering=0) as statm:
            return int(statm.read(128).split()[1]) * _PAGE
    except OSError:
        return 0


def _mem_available(root: Path) -> int:
    numbers = _table((root / "proc/meminfo").read_text(), ":")
    return numbers["MemAvailable"] * 1024


def _groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each limited control group of this process has left."""
    for mount, inside, path, version in _memberships(root):
        folder = mount / path.relative_to(inside) if path.is_relative_to(inside) else mount
        for group in (folder, *folder.parents):
            left = _left(group, version)
            if left is not None:
                yield left
            if group == mount:
                break


def _memberships(root: Path) -> Iterator[tuple[Path, Path, Path, int]]:
    """Yield (mount point, the group that is mounted there, this process's group, version) for each
    hierarchy that limits memory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return  # a kernel without control groups
    paths = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = Path(path)
        elif "memory" in controllers.split(","):
            paths[1] = Path(path)
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version in paths:
            _, _, _, inside, mount, *_ = fields.split(" ")
            yield root / _unescaped(mount).lstrip("/"), Path(_unescaped(inside)), paths[version], version


def _left(group: Path, version: int) -> int | None:
    """Return the bytes that a control group has left; None if `group` has no limit or is no control
    group."""
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    usage = _number(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    limits = [limit for name in names if (limit := _number(group / name)) is not None]
    if usage is None or not limits:
        return None
    try:
        stat = _table((group / "memory.stat").read_text(), " ")
    except OSError:
        stat = {}
    prefix = "" if version == 2 else "total_"
    return min(limits) - usage + sum(stat.get(prefix + name, 0) for name in RECLAIMED)


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file cannot be read or holds none, such as `max` for
    no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _table(text: str, separator: str) -> dict[str, int]:
    """Return the numbers by name from lines of a name, the separator and a number."""
    pairs = (line.partition(separator) for line in text.splitlines())
    return {name: int(value.split()[0]) for name, _, value in pairs if value.split()[:1]}


def _unescaped(path: str) -> str:
    """Return a path of mountinfo with its octal escapes (of blanks and backslashes) decoded."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
