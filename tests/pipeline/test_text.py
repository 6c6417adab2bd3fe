"""Text through real stages: what a client reads is what the model's own tokenizer says of the ids,
up to a stop string that never shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.clusters import Local, local_cluster
from tokenizers import Tokenizer as Backend

from zrt.runtime.client.conversation import Conversation
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


@pytest.mark.parametrize(("stop", "shown"), [("</s>", "aaa"), ("a</s>", "aa"), ("</s>b", "aaa"), ("a</s>bb", "aa")])
async def test_a_stop_string_may_be_or_name_a_special_token(speaking: Speaking, stop: str, shown: str) -> None:
    """The answer is aaa</s>bbb, whatever the model would say."""
    folder = speaking("byte-level")
    a, b, end = (backend(folder).token_to_id(name) for name in ("a", "b", "</s>"))
    async with local_cluster(folder, [None]) as cluster:
        _scripted(cluster, [a, a, a, end, b, b, b])
        text, ids, reason = await cluster.generate(
            token_ids=[a], max_tokens=7, temperature=0.0, ignore_eos=True, stop=["zz", stop]
        )
        assert (text, reason) == (shown, "stop")
        assert ids == [a, a, a, end, b, b][: 3 + len(stop.replace("</s>", "e").lstrip("a"))]
        text, ids, reason = await cluster.generate(token_ids=[a], max_tokens=7, temperature=0.0, ignore_eos=True)
        assert (text, reason) == ("aaabbb", "length")


def _scripted(cluster: Local, answer: list[int]) -> None:
    """Have the model say these tokens after a prompt of one, by its logits."""
    engine: Any = cluster.servers[-1].turns.engine
    forward = engine._decoder.forward

    def scripted(steps: Any, *rest: Any) -> Any:
        logits = forward(steps, *rest).clone()
        for row, step in enumerate(step for step in steps if step.logits):
            logits[row, answer[step.seq_pos]] = 1e6
        return logits

    engine._decoder.forward = scripted


async def test_what_goes_with_a_text_alone_is_refused_elsewhere(speaking: Speaking) -> None:
    folder = speaking("byte-level", chat_template=PLAIN, additional_special_tokens=["<beyond>"])
    async with local_cluster(folder, STAGES) as cluster:
        assert "special_as_text" in await refused(cluster, token_ids=[4], special_as_text=True)
        assert "template_options" in await refused(cluster, token_ids=[4], template_options={"a": 1})
        assert "template_options" in await refused(cluster, prompt="he", raw=True, template_options={"a": 1})
        assert "messages is not an option" in await refused(cluster, prompt="he", template_options={"messages": 1})
        for raw in (True, False):  # what the user gave is a text, not token ids
            said = await refused(cluster, prompt="he <beyond>", raw=raw)
            assert "'<beyond>'" in said
            assert "token_ids" not in said
            assert (await cluster.generate(prompt="he <beyond>", raw=raw, special_as_text=True, max_tokens=2))[1]


async def test_options_and_system_prompt_reach_the_template(speaking: Speaking) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{% if thinks %}{{ thinks }}{% endif %}"
    folder = speaking("byte-level", chat_template=template)
    async with local_cluster(folder, [None]) as cluster:

        async def length(**request: Any) -> int:
            stream = cluster.client.generate(**request, max_tokens=1)
            async for _ in stream:
                pass
            return stream.finished.prompt_tokens

        plain = await length(prompt="xyz")
        assert await length(prompt="xyz", template_options={"thinks": False, "unused": 1}) == plain
        assert await length(prompt="xyz", template_options={"thinks": "abc"}) == plain + 3
        assert await length(prompt="xyz", system="abc") == plain + len("system") + 3


async def test_a_chat_goes_on_when_its_context_is_full(speaking: Speaking) -> None:
    """The oldest turns go, the system prompt stays, and every answer has its room."""
    folder = speaking("byte-level", chat_template=PLAIN)
    async with local_cluster(folder, [None], model_context=128) as cluster:
        conversation, lost = Conversation("SYS", room=20), 0

        async def said(text: str) -> str | None:
            conversation.ask(text)
            while True:
                stream = cluster.client.generate(
                    messages=conversation.messages, room=conversation.room, max_tokens=20, ignore_eos=True
                )
                try:
                    answer = "".join([piece.text async for piece in stream])
                except ZrtError as error:
                    if not conversation.make_room(error):
                        return conversation.failed(error)
                    continue
                assert stream.finished.completion_tokens == 20
                return conversation.answered(answer)

        for turn in range(12):
            note = await said(f"{turn:02}" + "x" * 20)
            lost += "left out" in str(note)
            assert conversation.messages[0] == {"role": "system", "content": "SYS"}
            assert conversation.turns[-1][0].startswith(f"{turn:02}")
        assert 3 < lost < 12
        kept = conversation.turns
        assert "this message alone is too long" in str(await said("x" * 200))
        assert conversation.turns == kept
        assert await said("short") is not None
        assert conversation.turns[-1][0] == "short"


@pytest.mark.parametrize(
    ("room", "prompt", "fits"), [(0, 127, True), (8, 120, True), (8, 121, False), (99, 96, True), (99, 97, False)]
)
async def test_room_for_the_answer_is_a_quarter_of_the_context_at_most(
    speaking: Speaking, room: int, prompt: int, fits: bool
) -> None:
    async with local_cluster(speaking("byte-level"), [None], model_context=128) as cluster:
        request = {"token_ids": [4] * prompt, "room": room, "ignore_eos": True}
        if fits:
            assert len((await cluster.generate(**request))[1]) == 128 - prompt
            return
        with pytest.raises(
            ZrtError, match=f"has {prompt} tokens, the context holds 128, and {room} are wanted"
        ) as caught:
            await cluster.generate(**request)
        assert caught.value.kind == "context_exceeded"
