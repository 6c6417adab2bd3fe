"""Folders with small tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.vocabularies import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives a model folder with one of vocabularies.BACKENDS; keywords are further entries of its
    tokenizer_config.json."""

    written: dict[str, Path] = {}

    def write(kind: str, **settings: object) -> Path:
        key = kind + json.dumps(settings)
        if key not in written:
            written[key] = tmp_path_factory.mktemp(kind)
            write_tokenizer(written[key], kind, **settings)
        return written[key]

    return write
