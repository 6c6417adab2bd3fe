"""Small tokenizers of each kind, made by code."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend


def byte_level() -> Backend:
    """Return a tokenizer of GPT-2's kind: every byte is a token, some merges, and added tokens with
    and without characters of the alphabet."""
    vocabulary = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("Ġ", "he"), ("ð", "Ł"), ("ä", "½")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "日本", "a b", "é")])
    return backend


def byte_fallback(strip: bool) -> Backend:
    """Return a tokenizer of Llama 2's kind (`strip`) or Gemma's: a piece vocabulary where unknown
    characters fall to tokens of their bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehnot.,'", "▁▁", "he", "▁he", "▁a", "日"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("h", "e"), ("▁", "he"), ("▁", "a")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> Backend:
    """Return a tokenizer of T5's kind: unigram pieces, the first of which loses its leading
    space."""
    pieces = ["<unk>", "<s>", "</s>", *"▁abcdemnorstv.,!?'", "▁a", "▁.", "▁'", "n't", "▁n't", "▁'s", "'ve", "re", "▁▁"]
    backend = Backend(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def words() -> Backend:
    """Return a tokenizer of whole words without a decoder: tokens are joined by spaces."""
    backend = Backend(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, ".": 5}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "llama": lambda: byte_fallback(strip=True),
    "gemma": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "words": words,
}


def write_tokenizer(folder: Path, kind: str, **settings: object) -> None:
    """Write the files of one of BACKENDS; `settings` are further entries of its
    tokenizer_config.json."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"} | settings
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
