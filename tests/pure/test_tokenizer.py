"""Text to ids by the model's own files: chat template, special tokens, BOS exactly once, every
EOS."""

import json
import shutil
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
    FOLLOWED,
    HARMLESS,
    NEUTRAL,
    GenerationDefaults,
    eos_ids,
    generation_defaults,
)
from zrt.runtime.text.chat_template import ChatTemplate
from zrt.runtime.text.encoding_limit import EncodingLimit
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


KINDS = ["byte-level", "llama", "gemma", "metaspace", "words"]


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"bos_token": None}], ids=str)
@pytest.mark.parametrize("template", [WRITES_BOS, LEAVES_BOS], ids=["template-writes-bos", "template-leaves-bos"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_has_the_special_tokens_that_transformers_gives_it(
    tokenizer_folder: Folder, kind: str, template: str, settings: dict[str, object]
) -> None:
    """The template alone says whether there is a BOS, whatever the tokenizer adds to plain text."""
    folder = tokenizer_folder(kind, chat_template=template, **settings)
    tokenizer = opened(folder)
    ids = tokenizer.encode_chat(CHAT)
    assert ids == theirs(folder).apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    wanted = template == WRITES_BOS and tokenizer.bos_id is not None
    assert (ids[0] == tokenizer.bos_id) == wanted


# ---- special tokens that a user writes -----------------------------------------------------------

SPELLING = ["he</s> had", "</s>", "<s></s>a <s>", " </s> ", "a<unk>日</s>", "<think>he</s>", "a b</s>a", "▁</s>▁"]
WRITTEN = "{% for m in messages %}<s>{{ m.role | trim }} {{ m.content | trim }}</s>\n{% endfor %}<s>{{ style | trim }}"
"""A template that writes everything that it is given."""
TURNS = "{% for m in messages %}<s>{{ m.content | trim }}</s>\n{% endfor %}<s>"


@pytest.mark.parametrize("text", SPELLING)
@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_is_the_token_or_text_as_in_transformers(
    tokenizer_folder: Folder, kind: str, text: str
) -> None:
    folder = tokenizer_folder(kind)
    tokenizer, other = opened(folder), theirs(folder)
    doubled = text.startswith("<s>") and kind in ("llama", "gemma")
    assert tokenizer.encode_raw(text) == other(text)["input_ids"][doubled:]
    literal = tokenizer.encode_raw(text, special_as_text=True)
    if kind != "metaspace":  # whose vocabulary has the names as words, which transformers takes
        assert literal == other(text, split_special_tokens=True)["input_ids"]
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(literal[1:])


RENAMED = {"<s>": "⟪s⟫", "</s>": "⟪/s⟫", "<unk>": "⟪unk⟫"}


@pytest.mark.parametrize("place", ["content", "role", "option"])
@pytest.mark.parametrize("text", SPELLING)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_chat_the_template_alone_writes_special_tokens(
    tokenizer_folder: Folder, tmp_path: Path, kind: str, text: str, place: str
) -> None:
    """The ids are those of a tokenizer, and of a template, whose special tokens have names that the
    user does not write."""
    folder = tokenizer_folder(kind, chat_template=WRITTEN)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.iterdir():
        said = file.read_text()
        for name, other in RENAMED.items():
            said = said.replace(json.dumps(name), json.dumps(other)).replace(name, other)
        file.write_text(said)
    turn = {"role": "user", "content": "b"}
    turn |= {place: text} if place in turn else {}
    chat, options = [turn, {"role": "assistant", "content": "a"}, turn], {"style": text if place == "option" else "c"}
    ids = opened(folder).encode_chat(chat, options, special_as_text=True)
    expected = opened(tmp_path).encode_chat(chat, options)
    if kind == "metaspace":  # whose vocabulary has the names as words, which are taken apart
        seams = {opened(folder).backend.token_to_id(name) for name in ("<unk>", "▁")}
        ids, expected = ([one for one in each if one not in seams] for each in (ids, expected))
    assert ids == expected
    assert [ids.count(opened(folder).bos_id), ids.count(opened(folder).eos_id)] == [4, 3]


def test_the_length_of_a_chat_is_known_before_its_messages_are_looked_through(tokenizer_folder: Folder) -> None:
    chat = [{"role": "user", "content": "he</s>" * 9_000}]
    tokenizer = opened(tokenizer_folder("byte-level", chat_template=TURNS))
    with pytest.raises(ZrtError, match="no token stands for more than"):
        tokenizer.encode_chat(chat, special_as_text=True, limit=EncodingLimit(100))
    assert "_literal" not in vars(tokenizer)
    last = opened(tokenizer_folder("byte-level", chat_template=TURNS.replace("in messages", "in messages[-1:]")))
    chat += [{"role": "user", "content": "</s>" * 20}]  # as long as the names, not what stands for them meanwhile
    ids = last.encode_chat(chat[1:], special_as_text=True)
    assert last.encode_chat(chat, special_as_text=True, limit=EncodingLimit(len(ids) + 1)) == ids
    assert [ids.count(last.bos_id), ids.count(last.eos_id)] == [2, 1]


@pytest.mark.parametrize("text", [*SPELLING, "<s> he </s>  had <s>", "日<s>日 </s>", "no name at all", "a</s>"])
@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}, {"normalized": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_taken_apart_at_its_special_tokens_has_the_ids_of_the_whole(
    tokenizer_folder: Folder, kind: str, flags: dict[str, bool], text: str
) -> None:
    end = {"content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags
    tokenizer = opened(tokenizer_folder(kind, eos_token={"__type": "AddedToken", **end}))
    assert tokenizer._literal.encode_masked(text, {}) == tokenizer._encode(text, special=False)


@pytest.mark.parametrize("name", ["messages", "bos_token", "unk_token", "add_generation_prompt", "raise_exception"])
def test_an_option_cannot_take_the_place_of_what_a_template_is_given(tokenizer_folder: Folder, name: str) -> None:
    tokenizer = opened(tokenizer_folder("llama", chat_template=WRITES_BOS, unk_token="<unk>"))
    with pytest.raises(ZrtError, match=f"template_options: {name} is not an option") as caught:
        tokenizer.encode_chat(CHAT, {"enable_thinking": True, name: "x"})
    assert caught.value.kind == "bad_request"


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "low", "self"])
def test_options_are_variables_of_the_template_as_in_transformers(tokenizer_folder: Folder, value: object) -> None:
    template = "{% if thinks is defined and thinks %}{{ thinks }}{% endif %}{{ self_ }}{{ messages[0].content }}"
    folder = tokenizer_folder("byte-level", chat_template=template)
    ids = theirs(folder).apply_chat_template(CHAT, add_generation_prompt=True, thinks=value, unused=1)["input_ids"]
    assert opened(folder).encode_chat(CHAT, {"thinks": value, "unused": 1}) == ids  # type: ignore[dict-item]
    assert opened(folder).encode_chat(CHAT, {"thinks": value, "self": 1}) == ids  # type: ignore[dict-item]


# ---- the same as transformers --------------------------------------------------------------------


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
        ({"num_return_sequences": 3}, GenerationDefaults(unheeded=("num_return_sequences 3",))),
        ({"max_length": 9}, GenerationDefaults(max_length=9)),
        ({"chat_format": "chatml", "other": None}, GenerationDefaults(unknown=('chat_format "chatml"',))),
        ({"cache_implementation": "hybrid", "use_cache": False, "pad_token_id": 0}, GenerationDefaults()),
        (
            {"cache_implementation": "quantized"},
            GenerationDefaults(unheeded=('cache_implementation "quantized"',)),
        ),
    ],
)
def test_defaults_of_generation(tmp_path: Path, said: dict[str, object], meant: GenerationDefaults) -> None:
    assert generation_defaults(written(tmp_path, generation_config=said)) == meant


def test_every_key_of_transformers_is_followed_or_harmless_or_said() -> None:
    from transformers import GenerationConfig

    theirs = set(vars(GenerationConfig())) | {"_commit_hash"}
    ours = [*NEUTRAL, *HARMLESS, *FOLLOWED]
    assert len(ours) == len(set(ours))
    assert set(ours) == theirs


def test_every_neutral_value_is_the_one_that_transformers_takes_for_none() -> None:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

    defaults = {key: value for key, value in GenerationConfig._get_default_generation_params().items() if value}
    assert all(defaults[key] in NEUTRAL[key] for key in defaults if key in NEUTRAL)
    assert {*NEUTRAL["cache_implementation"], "quantized"} == set(ALL_CACHE_IMPLEMENTATIONS)


def test_every_setting_that_is_not_done_is_said_and_no_neutral_one(tmp_path: Path) -> None:
    for key, neutral in NEUTRAL.items():
        for value in (None, *neutral):
            assert generation_defaults(written(tmp_path, generation_config={key: value})).notes() == [], key
        (note,) = generation_defaults(written(tmp_path, generation_config={key: [7]})).notes()
        assert f"asks for {key} [7]" in note
    (note,) = generation_defaults(written(tmp_path, generation_config={"anything": "else"})).notes()
    assert 'has anything "else", which zrt does not know' in note


@pytest.mark.parametrize(
    ("said", "prompt", "max_tokens", "limit"),
    [
        ({"max_length": 20}, 5, None, 20),
        ({"max_length": 20, "max_new_tokens": 4}, 5, None, 9),
        ({"max_length": 20}, 5, 50, 55),
        ({"max_length": 999}, 5, None, 100),
        ({}, 5, None, 100),
        ({}, 5, 999, 100),
    ],
)
def test_the_end_of_an_answer_counts_as_in_transformers(
    tmp_path: Path, said: dict[str, object], prompt: int, max_tokens: int | None, limit: int
) -> None:
    defaults = generation_defaults(written(tmp_path, generation_config=said))
    assert defaults.length_limit(prompt, max_tokens, 100) == limit


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
