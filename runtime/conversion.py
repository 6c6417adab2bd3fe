"""GGUF to a safetensors folder, for the demo model: `python -m zrt.runtime.conversion FILE.gguf FOLDER`.

A program of its own because it imports torch, which the process that asks for a model must never do.
Each finished step is a line on stdout: the number done, a space, the number there are.
"""

import sys
from pathlib import Path

STEPS = 4


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32), tokenizer files and chat template.

    transformers dequantises the weights and undoes llama.cpp's reordering of the query and key rows. Its tokenizer
    reader does not know the pre-tokeniser that GGUF calls `smollm` (every digit by itself, then the byte-level split
    of GPT-2), so that one is set here.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _report(1)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _report(2)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    _report(3)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    for origin in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(origin, None)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # the library makes it private to its owner, unlike the rest
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    _report(4)


def _report(done: int) -> None:
    print(done, STEPS, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
