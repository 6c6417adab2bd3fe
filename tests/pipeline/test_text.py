"""Text through real stages: what a client reads is what the model's own tokenizer says of the ids,
up to a stop string that never shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import Local, local_cluster
from tokenizers import Tokenizer as Backend

from zrt.runtime.errors import ZrtError
from zrt.runtime.text.tokenizer import Tokenizer

STAGES = ["0-1", "2-3"]
LETTERS = "abcdnot"
"""Single tokens of every vocabulary here."""
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
RAISES = "{% if messages[0].role != 'user' %}{{ raise_exception('the first turn is the user\\'s') }}{% endif %}" + PLAIN

Speaking = Callable[..., Path]


def backend(folder: Path) -> Backend:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer.backend


def forced(folder: Path, pieces: str) -> dict[int, float]:
    """A bias that leaves nothing but these single tokens to be picked."""
    return {backend(folder).token_to_id(piece): 100.0 for piece in pieces}


@pytest.mark.parametrize("kind", ["byte-level", "gemma"])
async def test_a_stop_string_may_span_four_tokens(speaking: Speaking, kind: str) -> None:
    folder = speaking(kind)
    async with local_cluster(folder, STAGES) as cluster:
        request = {"prompt": "on", "raw": True, "max_tokens": 40, "temperature": 1.0, "seed": 4}
        request["logit_bias"] = forced(folder, LETTERS)
        text, ids, reason = await cluster.generate(**request)
        assert (len(text), len(ids), reason) == (40, 40, "length")
        start = next(n for n in range(9, 36) if text.find(text[n : n + 4]) == n)
        stop = text[start : start + 4]
        shown = ""
        stream = cluster.client.generate(**request, stop=["zzz", stop])
        token_ids: list[int] = []
        async for piece in stream:
            shown += piece.text
            token_ids += piece.token_ids
            assert text.startswith(shown)
            assert len(shown) <= start
        assert (shown, token_ids, stream.finished.reason) == (text[:start], ids[: start + 4], "stop")


@pytest.mark.parametrize("kind", ["byte-level", "gemma", "llama", "metaspace", "words"])
async def test_any_ids_read_as_the_tokenizer_says(speaking: Speaking, kind: str) -> None:
    """Random bytes among them, and an end inside a character."""
    folder = speaking(kind)
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    async with local_cluster(folder, STAGES) as cluster:
        for seed in range(4):
            text, ids, _ = await cluster.generate(
                token_ids=[4], max_tokens=60, temperature=1.5, seed=seed, ignore_eos=True
            )
            assert len(ids) == 60
            assert text == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "names"), [("byte-level", "Ã©"), ("gemma", ["<0xC3>", "<0xA9>"])])
async def test_an_answer_completes_the_character_its_prompt_began(
    speaking: Speaking, kind: str, names: list[str]
) -> None:
    folder = speaking(kind)
    first, second = (backend(folder).token_to_id(name) for name in names)
    letter = backend(folder).token_to_id("a")
    async with local_cluster(folder, STAGES) as cluster:
        request = {"max_tokens": 1, "temperature": 0.0, "logit_bias": {second: 100.0}}
        assert (await cluster.generate(token_ids=[letter, first], **request))[0] == "é"
        assert (await cluster.generate(token_ids=[letter], **request))[0] == "\ufffd"


async def test_end_tokens_that_do_not_end_it_have_no_text(speaking: Speaking) -> None:
    folder = speaking("byte-level", eos_token="<think>")  # no special token of this vocabulary
    end, letter = (backend(folder).token_to_id(name) for name in ("<think>", "a"))
    async with local_cluster(folder, STAGES) as cluster:
        request = {"prompt": "on", "raw": True, "max_tokens": 30, "temperature": 1.0, "seed": 0}
        request["logit_bias"] = {end: 100.0, letter: 100.0}
        text, ids, reason = await cluster.generate(**request, ignore_eos=True)
        assert set(ids) == {end, letter}
        assert (text, reason) == ("a" * ids.count(letter), "length")
        text, ids, reason = await cluster.generate(**request)
        assert (ids[-1], reason, text) == (end, "stop", "a" * (len(ids) - 1))


async def refused(cluster: Local, **request: object) -> str:
    with pytest.raises(ZrtError) as caught:
        await cluster.generate(**request, max_tokens=4)
    assert caught.value.kind == "bad_request"
    return caught.value.message


async def test_a_template_that_raises_refuses_the_chat_and_nothing_else(speaking: Speaking) -> None:
    async with local_cluster(speaking("byte-level", chat_template=RAISES), STAGES) as cluster:
        assert "the first turn is the user's" in await refused(cluster, messages=[{"role": "system", "content": "x"}])
        assert (await cluster.generate(prompt="he", max_tokens=4))[2] in ("length", "stop")


async def test_a_model_without_a_template_takes_raw_text_and_says_so(speaking: Speaking) -> None:
    async with local_cluster(speaking("byte-level"), STAGES) as cluster:
        assert "no chat template: use --raw" in await refused(cluster, prompt="he")
        assert "no chat template: use --raw" in await refused(cluster, messages=[{"role": "user", "content": "he"}])
        assert len((await cluster.generate(prompt="he", raw=True, max_tokens=4, ignore_eos=True))[1]) == 4


async def test_a_model_without_a_tokenizer_takes_ids_and_says_so(make_model: Callable[..., Path]) -> None:
    async with local_cluster(make_model("llama"), [None]) as cluster:
        assert "--token-ids" in await refused(cluster, prompt="he", raw=True)
        assert "stop strings" in await refused(cluster, token_ids=[4], stop=["x"])
        text, ids, _ = await cluster.generate(token_ids=[4], max_tokens=4, ignore_eos=True)
        assert (text, len(ids)) == ("", 4)


async def test_text_that_is_no_unicode_is_refused_before_it_is_sent(speaking: Speaking) -> None:
    """Half a character, as a command line or a file name may hold it."""
    async with local_cluster(speaking("byte-level"), STAGES) as cluster:
        assert "UTF-8" in await refused(cluster, prompt="caf\udcc3", raw=True)
        assert (await cluster.generate(prompt="he", raw=True, max_tokens=4))[2] in ("length", "stop")
