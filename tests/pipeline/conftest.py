"""What tests of whole pipelines may ask for besides."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.vocabularies import BACKENDS, write_tokenizer


@pytest.fixture
def speaking(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Makes a tiny model whose vocabulary is that of a real kind of tokenizer."""

    def make(kind: str, *, max_position_embeddings: int = 512, **settings: object) -> Path:
        size = BACKENDS[kind]().get_vocab_size()
        folder = tmp_path / kind
        made = make_model(
            "llama",
            vocab_size=size,
            eos_token_id=None,
            bos_token_id=None,
            max_position_embeddings=max_position_embeddings,
        )
        shutil.copytree(made, folder)
        write_tokenizer(folder, kind, **settings)
        return folder

    return make
