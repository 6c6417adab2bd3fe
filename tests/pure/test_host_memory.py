"""Memory that can be had: the kernel's figure, or what the tightest control group leaves."""

import os
from pathlib import Path

import pytest

from zrt.runtime.host_memory import available_memory

GIB = 1 << 30
MOUNTS = {
    2: "30 23 0:28 {inside} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
    1: "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
}


class Machine:
    """A file system with what the kernel shows of 16 GiB of which 10 are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: {2 << 20} kB\nMemAvailable: {10 << 20} kB\n")
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")

    def write(self, file: str, text: str) -> None:
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        (self.root / file).write_text(text)

    def join(self, path: str, *, version: int = 2, inside: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}\n" if version == 2 else f"4:memory:{path}\n0::/\n")
        self.write("proc/self/mountinfo", MOUNTS[version].format(inside=inside) + "\n")

    def group(self, path: str, used: int, *, cache: int = 0, **limits: int | str) -> None:
        """A version 2 group; `limits` are max and high."""
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(
            f"{folder}/memory.stat",
            f"anon {used - cache}\nfile {cache}\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}\n",
        )
        for name in ("max", "high"):
            self.write(f"{folder}/memory.{name}", f"{limits.get(name, 'max')}\n")

    def old_group(self, path: str, used: int, limit: int, *, cache: int = 0) -> None:
        """A version 1 group."""
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n")

    @property
    def available(self) -> float:
        """In GiB."""
        return available_memory(self.root) / GIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_it_is_what_the_kernel_says(machine: Machine) -> None:
    assert machine.available == 10
    (machine.root / "proc/self/cgroup").unlink()
    assert machine.available == 10


def test_a_group_without_a_limit_changes_nothing(machine: Machine) -> None:
    machine.join("/user.slice")
    machine.group("/user.slice", used=3 * GIB)
    assert machine.available == 10


def test_a_limit_leaves_what_is_not_used(machine: Machine) -> None:
    machine.join("/box")
    machine.group("/box", used=3 * GIB, max=8 * GIB)
    assert machine.available == 5


def test_page_cache_can_be_had(machine: Machine) -> None:
    machine.join("/box")
    machine.group("/box", used=3 * GIB, cache=2 * GIB, max=8 * GIB)
    assert machine.available == 7


def test_the_softer_limit_counts(machine: Machine) -> None:
    machine.join("/box")
    machine.group("/box", used=3 * GIB, max=8 * GIB, high=4 * GIB)
    assert machine.available == 1


def test_the_tightest_group_above_counts(machine: Machine) -> None:
    machine.join("/outer/inner/leaf")
    machine.group("/outer", used=5 * GIB, max=6 * GIB)
    machine.group("/outer/inner", used=1 * GIB, max=9 * GIB)
    machine.group("/outer/inner/leaf", used=1 * GIB)
    assert machine.available == 1


def test_a_group_that_is_over_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.join("/box")
    machine.group("/box", used=9 * GIB, max=8 * GIB)
    assert machine.available == 0


def test_in_a_container_the_group_is_the_root_of_its_mount(machine: Machine) -> None:
    machine.join("/")
    machine.group("", used=1 * GIB, max=4 * GIB)
    assert machine.available == 3


@pytest.mark.parametrize("path", ["/docker/0123", "/docker/0123/worker"])
def test_a_mount_may_begin_below_the_root_of_the_hierarchy(machine: Machine, path: str) -> None:
    machine.join(path, inside="/docker/0123")
    machine.group("", used=1 * GIB, max=4 * GIB)
    machine.group("/worker", used=1 * GIB)
    assert machine.available == 3


def test_a_group_outside_of_the_mount_is_taken_for_its_root(machine: Machine) -> None:
    machine.join("/elsewhere", inside="/docker/0123")
    machine.group("", used=1 * GIB, max=4 * GIB)
    assert machine.available == 3


def test_version_1_groups_limit_as_well(machine: Machine) -> None:
    machine.join("/outer/box", version=1)
    machine.old_group("/outer", 1 * GIB, 1 << 63)
    machine.old_group("/outer/box", 3 * GIB, 6 * GIB, cache=1 * GIB)
    assert machine.available == 4


def test_names_with_blanks_are_found(machine: Machine) -> None:
    machine.join("/my box/inner", inside=r"/my\040box")
    machine.group("/inner", used=1 * GIB, max=4 * GIB)
    assert machine.available == 3


def test_this_machine_has_some() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total
