"""Gives a tiny random model a tokenizer and a chat template, so that it can be talked to."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 160
"""The vocabulary of the tiny models: w0 to w159."""


def speaking(model: Path, folder: Path) -> Path:
    """A copy of `model` in `folder` whose tokens are the words w0, w1 and so on."""
    shutil.copytree(model, folder)
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}w4 {{ message.content }} w5 {% endfor %}w6"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
