"""A block server that leads tensor-parallel ranks: a real cluster in this process, with the ranks as its real children."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import Local, local_cluster
from peers import until

PROMPT = [1, 17, 93, 4, 150, 62, 62, 8, 31, 120, 5]


async def test_x(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    async with local_cluster(folder, [None], tp=[2]) as cluster:
        print(await cluster.greedy(PROMPT, 20))
        print((await cluster.client.status()).actors)
    async with local_cluster(folder, [None]) as cluster:
        print(await cluster.greedy(PROMPT, 20))
