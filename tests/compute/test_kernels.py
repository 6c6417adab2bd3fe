"""Kernels that are compiled once and kept: whatever becomes of the files, a process starts."""

import os
import resource
import subprocess
import sys
from pathlib import Path

LOAD = [sys.executable, "-c", "import zrt.runtime.compute.cpu.row_kernels"]
FULL = 512  # bytes of a file


def load(home: Path, *, largest: int = resource.RLIM_INFINITY) -> str:
    """What a process says that takes kernels from this home, where no file may become larger."""

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment["ZRT_HOME"] = str(home)
    done = subprocess.run(LOAD, env=environment, capture_output=True, text=True, check=True, preexec_fn=bounded)
    return done.stderr


def test_kernels_that_cannot_be_kept_or_were_damaged_are_compiled(tmp_path: Path) -> None:
    assert "compiled kernels cannot be kept" in load(tmp_path, largest=FULL)
    assert load(tmp_path) == ""  # there is room again
    sizes = {file: file.stat().st_size for file in tmp_path.rglob("*.nb?")}
    assert sizes
    for file, size in sizes.items():
        os.truncate(file, size // 2)
    assert "is damaged, and compiled anew" in load(tmp_path)
    assert {file: file.stat().st_size for file in tmp_path.rglob("*.nb?")} == sizes
