"""Textual's pilot takes the process's idleness for a sign that a key was handled; beside a cluster in the same process it waits in vain."""

import asyncio

import pytest
from textual import app


@pytest.fixture(autouse=True)
def _pilot_waits_for_no_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    async def soon(min_sleep: float = 0, max_sleep: float = 0) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(app, "wait_for_idle", soon)
