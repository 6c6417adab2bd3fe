"""A chat's turns and commands, and what is left out of it when the context is full."""

import argparse
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from zrt.runtime.cli.commands import load
from zrt.runtime.client.conversation import COMMANDS, FULL, ROOM, Conversation
from zrt.runtime.errors import KINDS, Kind, ZrtError

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text().replace("`", "")


def held(turns: int, system: str | None = None, **settings: Any) -> Conversation:
    conversation = Conversation(system, **settings)
    for turn in range(turns):
        conversation.ask(f"q{turn}")
        assert conversation.answered(f"a{turn}") == ""
    return conversation


def full(kind: str = "context_exceeded") -> ZrtError:
    return ZrtError(cast(Kind, kind), "the prompt has 9 tokens, the context holds 8")


def sent_turns(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["content"].startswith("q")]


def test_what_is_sent_is_the_system_prompt_all_turns_and_the_question() -> None:
    conversation = held(2, "be brief")
    conversation.ask("q2")
    assert [(one["role"], one["content"]) for one in conversation.messages] == [
        ("system", "be brief"),
        *[("user", "q0"), ("assistant", "a0"), ("user", "q1"), ("assistant", "a1"), ("user", "q2")],
    ]


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 30, 100])
def test_the_oldest_turns_go_in_few_attempts_and_the_system_prompt_stays(needed: int) -> None:
    conversation, attempts = held(100, "be brief"), 0
    conversation.ask("q100")
    while len(sent_turns(conversation)) > 101 - needed:
        assert conversation.make_room(full())
        attempts += 1
    left = sent_turns(conversation)
    assert left == [f"q{turn}" for turn in range(101 - len(left), 101)]
    assert 101 - len(left) < 2 * needed
    assert attempts <= needed.bit_length() + 1
    assert conversation.messages[0] == {"role": "system", "content": "be brief"}
    assert f"{101 - len(left)} turn" in conversation.answered("a100")
    assert sent_turns(conversation) == left


def test_a_message_that_is_too_long_by_itself_costs_no_turn() -> None:
    conversation = held(5)
    conversation.ask("q5")
    attempts = 0
    while conversation.make_room(full()):
        attempts += 1
        assert attempts < 10
    assert (sent_turns(conversation), conversation.room) == (["q5"], 0)
    assert "this message alone is too long" in conversation.failed(full())
    conversation.ask("q6")
    assert sent_turns(conversation) == ["q0", "q1", "q2", "q3", "q4", "q6"]
    assert conversation.room == ROOM


@pytest.mark.parametrize("kind", sorted(FULL))
def test_a_message_is_called_too_long_only_where_it_was_sent_alone(kind: str) -> None:
    """The pages may run out in the midst of an answer, before any turn was left out."""
    for left_out in range(4):
        conversation = held(3)
        conversation.ask("q3")
        while len(sent_turns(conversation)) > 4 - left_out:
            assert conversation.make_room(full(kind))
        assert ("alone" in conversation.failed(full(kind))) == (left_out == 3)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_only_an_error_about_the_length_leaves_turns_out(kind: str) -> None:
    conversation = held(2)
    conversation.ask("q2")
    assert conversation.make_room(full(kind)) == (kind in FULL)
    assert kind in conversation.failed(full(kind))
    assert conversation.question is None


def test_the_room_for_an_answer_is_what_the_answer_may_have() -> None:
    assert Conversation(room=7).room == 7


def test_a_question_without_an_answer_is_no_turn() -> None:
    conversation = held(1)
    conversation.ask("q1")
    assert conversation.answered("") == ""
    assert conversation.turns == [("q0", "a0")]


# ---- commands ------------------------------------------------------------------------------------


def said(conversation: Conversation, line: str) -> str:
    done = conversation.command(line)
    assert done is not None
    return done.said


def test_every_command_is_listed_in_help_and_in_that_of_the_command_line() -> None:
    words = {name.split()[0] for name in COMMANDS}
    assert words | {"/quit"} == set(held(0)._commands())
    parser = argparse.ArgumentParser()
    load("chat").add_arguments(parser)
    for name, about in COMMANDS.items():
        assert f"{name} " in said(held(0), "/help")
        assert about in said(held(0), "/help")
        assert name in load("chat").DESCRIPTION
        assert f"| {name} | {about} |" in PAGE


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_a_chat_may_be_left(line: str) -> None:
    done = held(1).command(line)
    assert done is not None
    assert done.leave


def test_turns_are_forgotten_and_taken_back() -> None:
    conversation = held(3, "be brief")
    assert said(conversation, "/undo") == "taken back: q2"
    assert sent_turns(conversation) == ["q0", "q1"]
    assert said(conversation, "/clear") == "2 turns forgotten"
    assert [one["role"] for one in conversation.messages] == ["system"]
    assert "no turn" in said(conversation, "/undo")


def test_the_system_prompt_is_set_and_taken_away() -> None:
    conversation = held(1)
    said(conversation, "/system  speak like  a pirate ")
    assert conversation.messages[0] == {"role": "system", "content": "speak like  a pirate"}
    assert "speak like  a pirate" in said(conversation, "/system")
    assert conversation.messages[0]["role"] == "user"
    assert sent_turns(conversation) == ["q0"]


def test_a_chat_is_saved_as_messages_and_no_other_file_is_overwritten(tmp_path: Path) -> None:
    conversation, file = held(1, "be brief"), tmp_path / "chat one.json"
    assert said(conversation, f"/save {file}") == f"saved: {file}"
    assert json.loads(file.read_text())["messages"] == conversation.messages
    conversation.ask("q1")
    conversation.answered("ä日")
    assert said(conversation, f"/save {file}") == f"saved: {file}"  # its own
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][-1]["content"] == "ä日"
    other = tmp_path / "other"
    other.write_text("mine")
    assert "is there already" in said(conversation, f"/save {other}")
    assert other.read_text() == "mine"
    assert f"no folder {tmp_path}{os.sep}no: make it" in said(conversation, f"/save {tmp_path}{os.sep}no{os.sep}folder")
    assert "/save FILE" in said(conversation, "/save")


@pytest.mark.parametrize("name", ["no/folder", "file/one", "x" * 300, "nul\0", "own\nline/x"])
def test_where_a_chat_cannot_be_saved_is_said_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    told = said(held(1), f"/save {name}")
    assert told.startswith("not saved")
    assert told.endswith("give another name")
    assert "Errno" not in told
    assert "\n" not in told


@pytest.mark.parametrize("line", ["/nosuch", "/", "/etc/passwd is what?", "/helpme"])
def test_a_command_that_is_none_is_not_sent(line: str) -> None:
    assert "there is no command" in said(held(1), line)


@pytest.mark.parametrize(("line", "text"), [("hello / there", "hello / there"), ("//etc is what?", "/etc is what?")])
def test_other_lines_are_questions(line: str, text: str) -> None:
    conversation = held(0)
    assert conversation.command(line) is None
    assert conversation.spoken(line) == text
