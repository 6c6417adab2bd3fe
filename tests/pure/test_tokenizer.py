"""Text to ids by the model's own files: chat template, special tokens, BOS exactly once, every
EOS."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.models.architecture.generation_config import (
    NEUTRAL,
    GenerationDefaults,
    eos_ids,
    generation_defaults,
)
from zrt.runtime.text.chat_template import ChatTemplate
from zrt.runtime.text.tokenizer import Tokenizer

Folder = Callable[..., Path]
WRITES_BOS = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LEAVES_BOS = WRITES_BOS.removeprefix("{{ bos_token }}")
RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + WRITES_BOS
CHAT = [{"role": "user", "content": "he had a bad 日"}]


def opened(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


def written(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("template", [WRITES_BOS, LEAVES_BOS], ids=["template-writes-it", "template-leaves-it"])
def test_a_chat_begins_with_bos_once_where_the_model_wants_it(tokenizer_folder: Folder, template: str) -> None:
    tokenizer = opened(tokenizer_folder("llama", chat_template=template))
    ids = tokenizer.encode_chat(CHAT)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.decode(ids).startswith("user: he had a bad 日")


def test_a_chat_begins_without_bos_where_neither_model_nor_template_want_it(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level", chat_template=LEAVES_BOS))
    assert tokenizer.bos_id not in tokenizer.encode_chat(CHAT)


def theirs(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


@pytest.mark.parametrize(
    "template",
    [
        WRITES_BOS,
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] | trim }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ eos_token }}",
        "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}{{ undefined_thing }}{{ pad_token }}",
        "{%- if tools is defined and documents is defined %}{{ bos_token ~ unk_token }}{%- endif -%}  ",
        "{{ messages[0].content.split(' ')[-1] }}{{ 'assistant' if add_generation_prompt }}",
    ],
)
def test_a_template_says_what_it_says_in_transformers(tokenizer_folder: Folder, template: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": " ok <b>é</b>\n"}, {"role": "tool", "content": "1"}]
    folder = tokenizer_folder("llama", chat_template=template, unk_token="<unk>")
    expected = theirs(folder).apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert (
        ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}).render(chat) == expected
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pad_token": "<think>", "bos_token": None},
        {"additional_special_tokens": ["日本", "<extra>"]},
        {"extra_special_tokens": {"image_token": "a b"}},
        {
            "eos_token": {
                "__type": "AddedToken",
                "content": "<end>",
                "lstrip": False,
                "rstrip": True,
                "single_word": False,
            }
        },
        {"added_tokens_decoder": {"263": {"content": "<think>", "special": True, "rstrip": True, "normalized": False}}},
        {"add_bos_token": True},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace"])
def test_ids_and_text_are_those_of_transformers(tokenizer_folder: Folder, kind: str, settings: dict[str, Any]) -> None:
    folder = tokenizer_folder(kind, **settings)
    tokenizer, other = opened(folder), theirs(folder)
    for text in ["he <think> 日本 a b", "<s>he</s>", "<end>  he<extra> a", " a  b ", "naïve 👩‍👩‍👧", "don't . x"]:
        ids = tokenizer.encode_raw(text)
        doubled = text.startswith("<s>") and kind == "llama" and tokenizer.bos_id is not None
        assert ids == other(text)["input_ids"][doubled:]
        assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (other.bos_token_id, other.eos_token_id)
    assert tokenizer.special_ids == {n for n, token in other.added_tokens_decoder.items() if token.special}


WRITINGS = {
    "emoji-with-joiners": "👩‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽",
    "cjk": "漢字かな交じり文、日本。한국어",
    "flags": "🇫🇷🇩🇪🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "combining-marks": "e\u0301 ẹ̀kọ́ नमस्ते a\u0323\u0302",
    "right-to-left": "שלום עליכם مرحبا",
    "odd-spaces": "a\u00a0b\u2009c\u200bd \t\r\n",
}


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("kind", ["byte-level", "gemma", "llama"])
def test_every_writing_comes_back_from_its_ids_as_it_was(tokenizer_folder: Folder, kind: str, writing: str) -> None:
    folder, text = tokenizer_folder(kind), WRITINGS[writing]
    tokenizer, other = opened(folder), theirs(folder)
    ids = tokenizer.encode_raw(text)
    assert ids == other(text)["input_ids"]
    assert tokenizer.decode(ids) == text == other.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("writing", WRITINGS)
def test_a_chat_in_every_writing_is_what_transformers_makes_of_it(tokenizer_folder: Folder, writing: str) -> None:
    folder = tokenizer_folder("byte-level", chat_template=WRITES_BOS)
    chat = [{"role": "user", "content": WRITINGS[writing]}]
    ids = theirs(folder).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert opened(folder).encode_chat(chat) == ids


def test_a_chat_is_what_transformers_makes_of_it(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder("llama", chat_template=WRITES_BOS)
    ids = theirs(folder).apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert opened(folder).encode_chat(CHAT) == ids


def test_of_several_templates_the_default_is_taken(tokenizer_folder: Folder) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": WRITES_BOS}]
    tokenizer = opened(tokenizer_folder("llama", chat_template=several))
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)).endswith("assistant:")


def test_special_tokens_of_older_models_lie_in_a_file_of_their_own(tokenizer_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder("llama") / "tokenizer.json").read_bytes())
    written(tmp_path, special_tokens_map={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"})
    tokenizer = opened(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_the_template_may_lie_in_a_file_of_its_own(tokenizer_folder: Folder, tmp_path: Path) -> None:
    for file in tokenizer_folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(WRITES_BOS)
    tokenizer = opened(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)).endswith("assistant:")


@pytest.mark.parametrize(
    ("settings", "messages", "says"),
    [
        ({}, CHAT, "--raw"),
        ({"chat_template": RAISES}, [{"role": "system", "content": "x"}], "no system role here"),
        ({"chat_template": "{% for"}, CHAT, "chat template"),
        ({"chat_template": "{{ messages[7].content }}"}, CHAT, "chat template"),
        ({"chat_template": WRITES_BOS}, [], "empty"),
        ({"chat_template": WRITES_BOS}, [{"role": "user", "content": ""}], "empty"),
    ],
    ids=["no-template", "template-raises", "template-is-broken", "template-asks-too-much", "no-message", "no-content"],
)
def test_a_chat_that_cannot_be_is_a_bad_request(
    tokenizer_folder: Folder, settings: dict[str, object], messages: list[dict[str, str]], says: str
) -> None:
    with pytest.raises(ZrtError) as raised:
        opened(tokenizer_folder("llama", **settings)).encode_chat(messages)
    assert raised.value.kind == "bad_request"
    assert says in raised.value.message


@pytest.mark.parametrize("text", ["he had", "<s>he had"], ids=["without", "with"])
def test_raw_text_begins_with_bos_once_whether_or_not_it_is_written(tokenizer_folder: Folder, text: str) -> None:
    tokenizer = opened(tokenizer_folder("llama"))
    ids = tokenizer.encode_raw(text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


def test_raw_text_gets_no_bos_that_the_tokenizer_does_not_add(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    assert tokenizer.decode(tokenizer.encode_raw("hello")) == "hello"
    assert tokenizer.bos_id not in tokenizer.encode_raw("hello")


def test_an_empty_text_is_a_bad_request(tokenizer_folder: Folder) -> None:
    with pytest.raises(ZrtError, match="empty"):
        opened(tokenizer_folder("llama")).encode_raw("")


def test_a_tokenizer_file_that_truncates_does_not_cut_the_prompt(tokenizer_folder: Folder, tmp_path: Path) -> None:
    settings = json.loads((tokenizer_folder("llama") / "tokenizer.json").read_text())
    settings["truncation"] = {"max_length": 4, "direction": "Right", "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": WRITES_BOS}))
    tokenizer = opened(tmp_path)
    assert len(tokenizer.encode_raw("a b c d e a b c d e")) > 4
    assert len(tokenizer.encode_chat(CHAT)) > 4


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None


def test_a_broken_tokenizer_file_is_a_bad_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ZrtError) as raised:
        Tokenizer.open(tmp_path)
    assert raised.value.kind == "bad_model"
    assert str(tmp_path) in raised.value.message


def test_eos_is_the_union_of_all_who_name_it(tokenizer_folder: Folder, tmp_path: Path) -> None:
    tokenizer = opened(tokenizer_folder("llama"))  # </s> is 2
    written(tmp_path, config={"eos_token_id": 7, "vocab_size": 9}, generation_config={"eos_token_id": [7, 8]})
    assert eos_ids(tmp_path, tokenizer) == {2, 7, 8}
    assert eos_ids(tmp_path, None) == {7, 8}


def test_a_model_may_have_no_eos(tmp_path: Path) -> None:
    assert eos_ids(written(tmp_path, config={"eos_token_id": None}), None) == frozenset()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, GenerationDefaults(Sampling(0.0, 0, 1.0))),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults(Sampling(0.0, 0, 1.0))),
        ({"do_sample": True}, GenerationDefaults(Sampling(1.0, 0, 1.0))),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None},
            GenerationDefaults(Sampling(0.6, 0, 0.9)),
        ),
        (
            {"do_sample": True, "temperature": 1, "top_k": 20, "pad_token_id": 0},
            GenerationDefaults(Sampling(1.0, 20, 1.0)),
        ),
        ({"top_p": 0.8, "top_k": 5, "min_p": 0.1}, GenerationDefaults(Sampling(0.0, 5, 0.8, 0.1))),
        ({"top_p": 0, "min_p": 0, "top_k": 0}, GenerationDefaults(Sampling(0.0, 0, 0.0, 0.0))),
        ({"repetition_penalty": 1.05}, GenerationDefaults(Sampling(repetition_penalty=1.05))),
        (
            {"max_new_tokens": 9, "min_new_tokens": 3},
            GenerationDefaults(Sampling(min_tokens=3), max_tokens=9),
        ),
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}, GenerationDefaults()),
        ({"num_beams": 4, "typical_p": 0.9}, GenerationDefaults(unheeded=("num_beams 4", "typical_p 0.9"))),
        ({"suppress_tokens": [1, 2]}, GenerationDefaults(unheeded=("suppress_tokens [1,2]",))),
    ],
)
def test_defaults_of_generation(tmp_path: Path, said: dict[str, object], meant: GenerationDefaults) -> None:
    assert generation_defaults(written(tmp_path, generation_config=said)) == meant


def test_every_neutral_value_is_the_one_that_transformers_takes_for_none() -> None:
    from transformers import GenerationConfig

    theirs = GenerationConfig._get_default_generation_params()
    assert set(NEUTRAL) <= set(GenerationConfig().to_dict()) | {"penalty_alpha", "dola_layers"}
    assert {key: theirs[key] for key in NEUTRAL if theirs.get(key) is not None} == {
        key: value for key, value in NEUTRAL.items() if theirs.get(key) is not None
    }


def test_without_a_generation_config_answers_are_greedy(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == GenerationDefaults(Sampling(temperature=0.0))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"do_sample": true, "temperature": "hot"}',
        '{"repetition_penalty": 0}',
        '{"min_p": 1.5}',
        '{"max_new_tokens": 0}',
    ],
)
def test_a_broken_generation_config_is_a_bad_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ZrtError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


def test_others_run_while_a_long_text_is_encoded(tokenizer_folder: Folder) -> None:
    tokenizer = opened(tokenizer_folder("byte-level"))
    text, spent = "words and words " * 60_000, [0.0]

    def encode() -> None:
        began = time.perf_counter()
        tokenizer.encode_raw(text)
        spent[0] = time.perf_counter() - began

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 100 * spent[0], (turns, spent[0])  # of the 1,000 a second that there could be


def test_nothing_here_imports_torch(tokenizer_folder: Folder) -> None:
    program = """
import sys
from pathlib import Path
from zrt.runtime.cluster import file_loader, partition
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture import generation_config
from zrt.runtime.models.fetch import resolve
from zrt.runtime.text import detokenizer, stop_strings
from zrt.runtime.text.tokenizer import Tokenizer
folder = Path(sys.argv[1])
tokenizer = Tokenizer.open(folder)
ids = tokenizer.encode_chat([{"role": "user", "content": "he had"}]) + tokenizer.encode_raw("he had")
detokeniser = detokenizer.Detokenizer(tokenizer)
said = "".join(map(detokeniser.push, ids)) + detokeniser.finish()
assert said == tokenizer.decode(ids), said
generation_config.eos_ids(folder, tokenizer), generation_config.generation_defaults(folder)
file_loader.load()
partition.plan([1, 1], 0, 0, [partition.Wish()])
stop_strings.StopMatcher(["x"]).push("y")
try:
    resolve.resolve("nobody/nothing")
except ZrtError:
    pass
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    folder = written(tokenizer_folder("llama", chat_template=WRITES_BOS), config={})
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.demo
def test_the_demo_model_chats_by_its_own_template(demo_model: Path) -> None:
    tokenizer = opened(demo_model)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    start, end = tokenizer.backend.token_to_id("<|im_start|>"), tokenizer.backend.token_to_id("<|im_end|>")
    assert (start, end) == (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [ids.count(start), ids.count(end)] == [3, 2]
    assert eos_ids(demo_model, tokenizer) == {end}
    assert generation_defaults(demo_model) == GenerationDefaults(Sampling(temperature=0.0))


@pytest.mark.demo
def test_the_demo_model_takes_every_digit_by_itself(demo_model: Path) -> None:
    tokenizer = opened(demo_model)
    names = [tokenizer.backend.id_to_token(n) for n in tokenizer.encode_raw("in 2024  10")]
    assert names == ["in", "Ġ", "2", "0", "2", "4", "ĠĠ", "1", "0"]
