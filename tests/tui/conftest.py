"""Textual's pilot takes the process's idleness for a sign that a key was handled; beside a cluster
in the same process it waits in vain.

Here it waits until every widget has handled what was in its queue, as often as a key may be handed
on.
"""

import asyncio

import pytest
from textual import app
from textual.pilot import Pilot

HANDED_ON = 6
"""A key that the focused widget does not take goes to its parent's queue, and so up to the app;
what it does there may add to others."""


@pytest.fixture(autouse=True)
def _keys_are_handled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    press = Pilot.press

    async def soon(min_sleep: float = 0, max_sleep: float = 0) -> None:
        await asyncio.sleep(0.001)

    async def press_one_by_one(pilot: Pilot[None], *keys: str) -> None:
        for key in keys:
            await press(pilot, key)
            for _ in range(HANDED_ON):
                await pilot._wait_for_screen()

    monkeypatch.setattr(app, "wait_for_idle", soon)
    monkeypatch.setattr(Pilot, "press", press_one_by_one)
