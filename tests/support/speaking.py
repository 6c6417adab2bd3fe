"""A tokenizer and a chat template for tiny random models, so that one can talk to them."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 160
"""The size of the tiny models' vocabulary: w0 to w159."""


def speaking(model: Path, folder: Path) -> Path:
    """Copy `model` to `folder`, with the words w0, w1 and so on for tokens, and return `folder`."""
    shutil.copytree(model, folder)
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}w4 {{ message.content }} w5 {% endfor %}w6"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
