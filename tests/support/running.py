"""`zrt up` as a user runs it: a real process with real children, on a free port, with a home of its
own."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from zrt.runtime.process.python_command import python_command

READY_S = 90.0
ACTOR = python_command("zrt.actors.main")
END_S = 20.0


@dataclass
class Running:
    """A `zrt up` that runs, with the endpoint it told. `home` is its $ZRT_HOME."""

    process: subprocess.Popen[str]
    endpoint: str
    home: Path

    def zrt(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run another command against this cluster."""
        return run_zrt(*words, home=self.home, timeout=timeout)

    def children(self) -> dict[str, psutil.Process]:
        """Return the cluster's processes by actor name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                words = child.cmdline()
                if words[: len(ACTOR)] != ACTOR:
                    continue  # it is being started, or is just ending
                found[words[words.index("--name") + 1]] = child
        return found

    def end(self, number: int = signal.SIGINT) -> int:
        """Send `zrt up` a signal and wait; return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


def run_zrt(
    *words: str, home: Path, timeout: float = 60.0, stdin: str | None = "", on: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. `stdin` is the text of its standard input; None: that is closed.
    `on`: what goes before its words."""
    command = [*on, sys.executable, "-m", "zrt.runtime.cli.main", *words]
    if stdin is None:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    return subprocess.run(
        command,
        capture_output=True,
        check=False,
        input=stdin,
        timeout=timeout,
        env=environment(home),
        encoding="utf-8",
        errors="surrogateescape",
    )


def start_zrt(*words: str, home: Path, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zrt.runtime.cli.main", *words]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home) | extra,
        pass_fds=[int(fd) for name, fd in extra.items() if name.endswith("_FD")],
        preexec_fn=_as_from_a_shell,
    )


SHELLS_DESCRIPTORS = 1024


def _as_from_a_shell() -> None:
    """Undo what children inherit from whoever runs the tests: ignored Ctrl-C in the background, and
    a higher limit of descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (SHELLS_DESCRIPTORS, hard))


def begun(process: subprocess.Popen[str]) -> str:
    """Return the first byte of a process's answer, read so that the rest stays for
    `communicate`."""
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1).decode()
    assert first, "there was no answer"
    return first


@contextmanager
def running(*words: str, home: Path) -> Iterator[Running]:
    """Run a cluster until it is ready, and kill all its processes at the end if the test left it
    running."""
    reader, writer = os.pipe()
    with open(reader) as pipe:
        process = start_zrt("up", *words, home=home, ZRT_READY_FD=str(writer))
        os.close(writer)
        family = psutil.Process(process.pid)
        try:
            line = pipe.readline()
            if not line:
                said = process.stderr.read() if process.stderr else ""
                raise AssertionError(f"zrt up ended with {process.wait(END_S)}: {said}")
            yield Running(process, json.loads(line)["endpoint"], home)
        finally:
            if process.poll() is None:
                left = family.children(recursive=True)
                process.kill()
                psutil.wait_procs([psutil.Process(process.pid), *left], END_S)
            process.communicate()


def family(home: Path) -> list[psutil.Process]:
    """Return every process of the clusters that were started with this home: children inherit it,
    whatever parent they have by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ZRT_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone(processes: Sequence[psutil.Process], within: float = 5.0) -> bool:
    """Return whether all processes end in time."""
    return not psutil.wait_procs(processes, within)[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZRT_")}
    return clean | {"ZRT_HOME": str(home), "HF_HUB_OFFLINE": "1"}


GREEDY = ["generate", "--token-ids", "1,2,3", "--temperature", "0"]


@contextmanager
def answering(cluster: Running, tokens: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a greedy generation that has begun; yield its process and the first character of its
    answer."""
    process = start_zrt(*GREEDY, "--max-tokens", str(tokens), home=cluster.home)
    try:
        yield process, begun(process)
    finally:
        process.kill()
        process.communicate()


def slow_model(folder: Path) -> Path:
    """Write the config of a model whose random weights take a while to make, and return its
    folder."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    sizes |= {"vocab_size": 160, "max_position_embeddings": 1 << 16}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return folder
