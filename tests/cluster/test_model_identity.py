"""A model that is saved anew under a running `zrt up`."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.running import Running, running
from support.tiny_models import reference

from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError


def test_zrt_up_says_which_file_is_another_models_and_serves_again_when_the_old_one_is_back(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(make_model("llama", eos_token_id=None), tmp_path / "model")
    conf, file = tmp_path / "cluster.toml", folder / "model.safetensors"
    conf.write_text(cluster_file(folder, ["0-1", "2-3"]))
    wanted, old = reference(folder, [1, 2, 3], 16), file.read_bytes()

    async def live(cluster: Running) -> None:
        assert cluster.process.stderr is not None
        said: Iterator[str] = iter(cluster.process.stderr.readline, "")

        async def line_with(words: str) -> str:
            return await asyncio.to_thread(lambda: next(line for line in said if words in line))

        async with Client(cluster.endpoint) as client:

            async def ids() -> list[int]:
                stream = client.generate(token_ids=[1, 2, 3], max_tokens=16, temperature=0.0)
                return [token async for piece in stream for token in piece.token_ids]

            assert await ids() == wanted
            file.write_bytes((make_model("llama", eos_token_id=None, seed=1) / file.name).read_bytes())
            cluster.children()["stage1"].kill()
            refusal = f"zrt: stage1 is not ready: bad_model: {file} (tensor "
            assert (await line_with("not ready")).startswith(refusal)
            restarted = cluster.children()["stage1"]
            with pytest.raises(ZrtError) as error:
                await ids()
            assert error.value.kind == "bad_model"
            file.write_bytes(old)
            assert "is ready again" in await line_with("stage1")
            assert await ids() == wanted
        assert cluster.children()["stage1"] == restarted  # it waited for the files, and was not started over and over

    with running(str(conf), home=tmp_path) as cluster:
        asyncio.run(live(cluster))
