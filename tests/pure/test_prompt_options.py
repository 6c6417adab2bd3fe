"""What goes with a prompt into the model's chat template: by the command line, by the client and on
the wire alike."""

from typing import Any

import msgspec
import pytest

from zrt.runtime.cli.main import command_line
from zrt.runtime.cli.question import given_chat, read_question
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Generate
from zrt.runtime.wire.clients import decode_client, encode_client
from zrt.runtime.wire.decode_errors import WireError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-12", -12),
        ("0.5", 0.5),
        ("low", "low"),
        ('"true"', "true"),
        ('"3"', "3"),
        ("", ""),
        ("a=b", "a=b"),
        ("null", "null"),
        ("NaN", "NaN"),
        ("[1]", "[1]"),
        ("99999999999999999999", "99999999999999999999"),
    ],
)
@pytest.mark.parametrize("command", ["generate hi", "chat", "up"])
def test_a_value_of_a_template_option_has_the_type_it_looks_like(command: str, written: str, value: object) -> None:
    parsed = command_line().parse_args([*command.split(), "--template-option", f"enable_thinking={written}"])
    options = given_chat(parsed)["template_options"]
    assert options == {"enable_thinking": value}
    assert type(options["enable_thinking"]) is type(value)
    request = decode_client(encode_client(Generate(id="7", template_options=options)))
    assert isinstance(request, Generate)
    assert request.template_options == options


@pytest.mark.parametrize("word", ["enable_thinking", "=1", "a b=1", "a-b=1", "a=" + "x" * 5000])
def test_what_is_no_option_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line().parse_args(["generate", "hi", "--template-option", word])
    assert "--template-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "hi --raw --system x",
        "hi --raw --template-option a=1",
        "--token-ids 1 --system x",
        "--token-ids 1 --template-option a=1",
        "--token-ids 1 --special-as-text",
        "--token-ids 1 --raw",
        "hi --template-option a=1 --template-option a=2",
    ],
)
def test_what_goes_with_no_chat_is_refused(words: str) -> None:
    with pytest.raises(ZrtError, match=r"--template-option|--special-as-text|--raw goes") as caught:
        read_question(command_line().parse_args(["generate", *words.split()]))
    assert caught.value.kind == "bad_config"


OPTIONS: list[Any] = [
    {"a": None},
    {"a": [1]},
    {"a": 2**64},
    {"a": "x" * 4097},
    {"": 1},
    dict.fromkeys(map(str, range(65)), 1),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: repr(options)[:20])
def test_a_value_that_is_no_option_is_refused_everywhere(options: Any) -> None:
    with pytest.raises(ZrtError, match="template_options") as caught:
        Client("tcp://127.0.0.1:1").generate("hi", template_options=options)
    assert caught.value.kind == "bad_request"
    if options != {"a": 2**64}:  # which msgpack cannot say
        with pytest.raises(WireError, match="template_options"):
            decode_client(msgspec.msgpack.encode({"type": "generate", "id": "7", "template_options": options}))


def sent(**given: Any) -> Generate:
    return Client("tcp://127.0.0.1:1").generate(**given)._request


def test_a_system_prompt_is_the_first_message() -> None:
    chat = [{"role": "user", "content": "hi"}]
    for request in (sent(prompt="hi", system="be brief"), sent(messages=chat, system="be brief")):
        assert request.prompt is None
        assert request.messages is not None
        assert [(one.role, one.content) for one in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert sent(prompt="hi", system="").prompt == "hi"


@pytest.mark.parametrize("given", [{"prompt": "hi", "raw": True}, {"token_ids": [1]}, {}])
def test_a_system_prompt_goes_with_a_chat(given: dict[str, Any]) -> None:
    with pytest.raises(ZrtError, match="system goes with"):
        sent(system="be brief", **given)
