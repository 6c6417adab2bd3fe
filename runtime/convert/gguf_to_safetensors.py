"""The conversion of a GGUF file to a safetensors folder, for the demo model: `python -m
zrt.runtime.convert.gguf_to_safetensors FILE.gguf FOLDER`.

A program of its own because it imports torch, which the process that asks for a model must never
import. Each finished step is a line on stdout: the number done, a space, the number there are.
"""

import json
import sys
from pathlib import Path
from typing import Final

from zrt.runtime.models.fetch.demo import STEPS

CONTROL: Final = 3
"""The token type of special tokens in GGUF."""


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(source, folder)
    _report(1)
    write_model(source, folder)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja of a byte-level BPE
    vocabulary.

    Its pre-tokeniser is the one that GGUF calls `smollm`: every digit by itself, then GPT-2's
    byte-level split.
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(source).fields
    said = {name.removeprefix("tokenizer.ggml."): field for name, field in fields.items()}
    if (kind := said["pre"].contents()) != "smollm":
        raise ValueError(f"pre-tokeniser {kind!r} is not known")
    tokens = said["tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in said["merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = said["token_type"].contents()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))

    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": tokens[said[f"{theirs}_token_id"].contents()] for name, theirs in names.items()}
    context = fields[f"{fields['general.architecture'].contents()}.context_length"].contents()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"].contents(), encoding="utf-8")


def write_model(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in float32.

    transformers dequantises the weights and undoes llama.cpp's reordering of the query and key
    rows.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    _report(2)
    for origin in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(origin, None)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # the library makes this file private to its owner, unlike the others
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    _report(3)


def _report(done: int) -> None:
    print(done, STEPS, flush=True)


if __name__ == "__main__":
    main()
