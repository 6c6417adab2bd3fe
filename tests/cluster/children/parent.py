"""A supervisor to be killed: starts children that each start one of their own, and writes all their
process ids to the folder given."""

import asyncio
import os
import sys
from pathlib import Path

from zrt.runtime.process.supervisor import ChildObserver, Supervisor


async def live(folder: Path) -> None:
    supervisor = Supervisor(ChildObserver())
    program = str(Path(__file__).parent / "child.py")
    children = [
        supervisor.spawn("one", [sys.executable, program, "hold", f"child={folder / 'grandchild'}"]),
        supervisor.spawn("two", [sys.executable, program, "hold", "deaf", "ready", "wait"]),
        supervisor.spawn("three", [sys.executable, program, "hold", "threads", "ready", "wait"]),
    ]
    for child in children:
        await child.ready()
        (folder / child.name).write_text(str(child.pid))
    (folder / "parent").write_text(str(os.getpid()))
    (folder / "all").touch()
    await asyncio.Event().wait()


asyncio.run(live(Path(sys.argv[1])))
