"""Long texts: cut where the ids stay equal, refused early where their length says so."""

import json
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import BACKENDS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from zrt.runtime.errors import ZrtError
from zrt.runtime.text import cuts
from zrt.runtime.text.encoding_limit import EncodingLimit
from zrt.runtime.text.tokenizer import Tokenizer
from zrt.runtime.text.tokenizer_files import TokenizerSettings

# written for these tests in the manner of the published ones: words with the space before them,
# contractions, runs of digits, blanks, line ends
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LINES = (
    r"(?i:'(?:s|d|m|t|ll|ve|re))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["the cat and the dog ran over a hill, didn't they?", "One two THREE 1234 hé日本 \n\n  x = y;"] * 20


def trained(pattern: str | None, *, normalizer: normalizers.Normalizer | None = None, digits: bool = False) -> Backend:
    """Return a byte-level tokenizer with merges learnt from CORPUS."""
    backend = Backend(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    digit = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps = [*digit, *split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", special=False, rstrip=True), AddedToken("[x]", lstrip=True)])
    return backend


def around(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return backend


CUT: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: trained(None),
    "digits": lambda: trained(None, digits=True),
    "contractions": lambda: around(trained(WORDS)),
    "lines": lambda: trained(LINES, normalizer=normalizers.NFC()),
}
WHOLE: dict[str, Callable[[], Backend]] = {
    **BACKENDS,
    "several words to a word": lambda: trained(r"\p{L}+(?: \p{L}+)*|\s+|[^\s\p{L}]+"),
    "lower case": lambda: trained(None, normalizer=normalizers.Lowercase()),
}
SHAPES = CUT | WHOLE
ALPHABET = [
    "a",
    "T",
    "the",
    " ",
    " ",
    "  ",
    "\n",
    "1",
    "23",
    "é",
    "e\u0301",
    "日",
    "😀",
    ",",
    "'s",
    "<s>",
    "<think>",
    "[x]",
    "<|end|>",
    "\x04",
    "K",
]
texts = st.lists(st.sampled_from(ALPHABET), max_size=60).map("".join)


def opened(backend: Backend) -> Tokenizer:
    nothing: dict[str, AddedToken] = {}
    return Tokenizer(backend, TokenizerSettings(nothing, [], [], None, False), "tiny")


MADE = {name: opened(make()) for name, make in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=60, deadline=None)
@given(text=texts.filter(bool), piece=st.integers(1, 20))
def test_the_ids_of_the_pieces_are_those_of_the_whole(name: str, text: str, piece: int) -> None:
    tokenizer = MADE[name]
    whole = tokenizer.backend.encode(text).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "PIECE", piece)
        assert "".join(tokenizer.cuts.pieces(text)) == text
        assert tokenizer.encode_raw(text) == whole


@pytest.mark.parametrize("name", SHAPES)
def test_texts_are_cut_where_a_tokenizer_allows_it(name: str) -> None:
    count = len(list(MADE[name].cuts.pieces("the cat and " * 30_000)))
    assert count > 3 if name in CUT else count == 1


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str) -> None:
    made = MADE[name]
    assert made.least_tokens.of(text) <= len(made.backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", [*CUT, "llama", "gemma"])
def test_a_text_far_beyond_the_context_is_refused_by_its_length(name: str) -> None:
    made = MADE[name]
    encoded: list[int] = []
    with pytest.raises(ZrtError) as raised:
        made.encode_raw("the cat and " * 10_000, limit=EncodingLimit(100, lambda done, total: encoded.append(done)))
    assert raised.value.kind == "context_exceeded"
    assert f"no token stands for more than {made.least_tokens.bytes_per_token} bytes" in raised.value.message
    assert not encoded


def test_a_text_is_not_tokenised_beyond_the_context() -> None:
    made, text, context = MADE["contractions"], "a b c d " * 50_000, 100_000
    assert made.least_tokens.of(text) < context
    encoded: list[int] = []
    with pytest.raises(ZrtError, match=r"more than \d+ tokens") as raised:
        made.encode_raw(text, limit=EncodingLimit(context, lambda done, total: encoded.append(done)))
    assert raised.value.kind == "context_exceeded"
    assert 0 < max(encoded) <= len(text) * 3 // 4


def test_other_threads_run_while_a_text_is_tokenised() -> None:
    """The library lets go of the interpreter: a thread that sleeps briefly, again and again, wakes
    far more often than once a piece."""
    backend, text = MADE["gpt2"].backend, "the cat and " * 60_000
    wakes, over = 0, threading.Event()

    def tick() -> None:
        nonlocal wakes
        while not over.wait(0.002):
            wakes += 1

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    backend.encode_batch_fast([text])
    seconds = time.perf_counter() - began
    over.set()
    thread.join()
    assert wakes > min(20, seconds / 0.002 / 10)


def test_the_shapes_are_what_they_are_called() -> None:
    assert json.loads(MADE["lines"].backend.to_str())["normalizer"] == {"type": "NFC"}
    assert {name for name in SHAPES if MADE[name].least_tokens.bytes_per_token} >= {*CUT, "llama", "gemma"}
