"""What every room's tests may ask for: tiny random models on disk, made by transformers itself."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import TINY, save_model

from zrt.runtime.models.fetch.resolve import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if (
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
):  # under nohup; what tests start is to hear it when its terminal closes
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SEED = os.environ.get("ZRT_SEED", "0")
"""Which cases of a matrix `make test` runs."""
ROOMS = ("chaos", "cluster", "tui", "pipeline", "compute", "actors", "wire", "pure", "gpu")
"""Rooms of tests, those of the longest files first: files are given out in this order where several
run at once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each matrix and each value of the parameter it names, all but one case (chosen by the
    seed) are for `make chaos`."""
    items.sort(key=lambda item: ROOMS.index(item.path.relative_to(Path(__file__).parent).parts[0]))
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("matrix")
        if marker is not None:
            value = item.callspec.params[marker.args[0]]  # type: ignore[attr-defined]
            cases.setdefault((item.nodeid.split("[")[0], repr(value)), []).append(item)
    for group in cases.values():
        for item in sorted(group, key=lambda item: hashlib.blake2b(f"{SEED} {item.nodeid}".encode()).digest())[1:]:
            item.add_marker(pytest.mark.chaos)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model, fetched and converted if the cache lacks it."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model(family, *, tied=False, seed=0, dtype="float32", files=1, **config)`: the folder
    of a tiny random model.

    `family` is a `model_type`; `config` overrides the keys of `TINY`; `files` > 1 writes indexed
    shards. Weights are random everywhere (norms around 1, biases away from 0), so that no part of a
    model can be left out unnoticed. Equal arguments, equal folder.
    """
    made: dict[str, Path] = {}

    def make(
        family: str, *, tied: bool = False, seed: int = 0, dtype: str = "float32", files: int = 1, **config: Any
    ) -> Path:
        key = repr((family, tied, seed, dtype, files, sorted(config.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            save_model(made[key], family, TINY | {"tie_word_embeddings": tied} | config, seed, dtype, files)
        return made[key]

    return make
