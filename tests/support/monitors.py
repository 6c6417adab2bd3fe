"""The screen of the monitor, read and waited for."""

import asyncio
from collections.abc import Callable

from textual.pilot import Pilot

from zrt.tui.app import Top
from zrt.tui.lines import Lines

WAIT_S = 30.0


async def until(pilot: Pilot[None], seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not seen():
            await pilot.pause(0.02)


def screen(top: Top) -> str:
    """Return what is on the screen, as text."""
    return "\n".join(strip.text.rstrip() for strip in top.screen._compositor.render_strips())


async def on(pilot: Pilot[None], top: Top, name: str) -> None:
    """Put the cursor on a process."""
    lines = top.query_one("#cluster", Lines)
    await pilot.press("1", "home")
    for _ in range(20):
        if lines.row is not None and lines.row.key == name:
            return
        await pilot.press("down")
    raise AssertionError(f"{name} is not there")
