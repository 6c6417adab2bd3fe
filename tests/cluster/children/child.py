"""A child that does what its words say, one after the other. Words are `verb` or `verb=argument`.

hold                hold the lifeline
ready               tell the parent that it is ready, with its process id as its incarnation
failed=KIND         tell the parent why it is not
say=TEXT            a line to stderr; `out=TEXT` one to stdout; `partial=TEXT` one without an end; `flood=N` N lines
exit=STATUS, die=SIGNAL
deaf                ignore SIGTERM
child=PATH          start this program again as a supervised child that does `hold ready wait`; write its process id to PATH
stray=PATH          start a plain process in our group; write its process id to PATH
count=PATH          add a line to PATH
until=PATH          go on when PATH exists
wait                for ever
close               close the ready pipe without a word
threads             run a thread that takes the interpreter's lock as often as it can
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from zrt.runtime.process.lifeline import READY_FD, Lifeline, hold


def _supervised_child(path: str) -> None:
    from zrt.runtime.process.supervisor import Child, ChildObserver, Death, Supervisor

    class Observer(ChildObserver):
        def on_death(self, child: Child, death: Death) -> None:
            os._exit(9)

    async def parent() -> None:
        supervisor = Supervisor(Observer())
        child = supervisor.spawn("grandchild", [sys.executable, __file__, "hold", "ready", "wait"])
        await child.ready()
        _write(path, child.pid)
        lifeline.ready("tcp://127.0.0.1:1", os.getpid())
        await asyncio.Event().wait()

    asyncio.run(parent())


def _write(path: str, pid: int) -> None:
    new = Path(path + ".new")
    new.write_text(str(pid))
    new.rename(path)


def _busy() -> None:
    while True:
        pass


lifeline = Lifeline(None)
for word in sys.argv[1:]:
    verb, _, argument = word.partition("=")
    match verb:
        case "hold":
            lifeline = hold()
        case "ready":
            lifeline.ready("tcp://127.0.0.1:1", os.getpid())
        case "failed":
            lifeline.failed(argument, "as it was told to", "child.py")
        case "say":
            print(argument, file=sys.stderr, flush=True)
        case "out":
            print(argument, flush=True)
        case "partial":
            sys.stderr.write(argument)
            sys.stderr.flush()
        case "flood":
            for number in range(int(argument)):
                print(f"line {number}", file=sys.stderr)
        case "exit":
            sys.exit(int(argument))
        case "die":
            os.kill(os.getpid(), signal.Signals[argument])
            signal.pause()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "child":
            _supervised_child(argument)
        case "stray":
            _write(argument, subprocess.Popen(["sleep", "600"]).pid)
        case "count":
            with open(argument, "a") as file:
                file.write("once\n")
        case "until":
            while not Path(argument).exists():
                time.sleep(0.01)
        case "wait":
            signal.pause()
        case "close":
            os.close(int(os.environ[READY_FD]))
        case "threads":
            threading.Thread(target=_busy, daemon=True).start()
        case _:
            sys.exit(f"no such word: {word}")
