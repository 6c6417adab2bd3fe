"""Supervision is tested on uvloop and on asyncio's own loop; the rest of this folder on the default
one."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    if item.path.name != "test_supervise.py":
        return None
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
