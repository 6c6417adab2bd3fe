"""A model that is saved anew under a running `zrt up`."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from support.clusters import cluster_file
from support.running import GREEDY, running
from support.tiny_models import reference


def test_zrt_up_says_which_file_is_another_models_and_serves_again_when_the_old_one_is_back(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(make_model("llama", eos_token_id=None), tmp_path / "model")
    conf, file = tmp_path / "cluster.toml", folder / "model.safetensors"
    conf.write_text(cluster_file(folder, [None, None]))
    wanted, old = reference(folder, [1, 2, 3], 16), file.read_bytes()
    ask = [*GREEDY, "--max-tokens", "16", "--json"]
    with running(str(conf), home=tmp_path) as cluster:
        assert cluster.process.stderr is not None
        said: Iterator[str] = iter(cluster.process.stderr.readline, "")
        assert json.loads(cluster.zrt(*ask).stdout)["token_ids"] == wanted
        file.write_bytes((make_model("llama", eos_token_id=None, seed=1) / file.name).read_bytes())
        cluster.children()["stage1"].kill()
        line = next(line for line in said if "not ready" in line)
        assert line.startswith(f"zrt: stage1 is not ready: bad_model: {file} (tensor ")
        restarted = cluster.children()["stage1"]
        assert json.loads(cluster.zrt(*ask).stdout)["error"]["kind"] == "bad_model"
        file.write_bytes(old)
        assert "is ready again" in next(line for line in said if "stage1" in line)
        assert json.loads(cluster.zrt(*ask).stdout)["token_ids"] == wanted
        assert cluster.children()["stage1"] == restarted  # it waited for the files, and was not started over and over
