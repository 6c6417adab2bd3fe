"""One table of a generation's options: the request, the command line, the client, a model's own
defaults and the checks say the same of each."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import fields

from zrt.runtime.cli.commands import load
from zrt.runtime.cli.main import command_line
from zrt.runtime.cli.sampling_arguments import given_sampling
from zrt.runtime.client.client import Client
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Generate
from zrt.runtime.messages.prompt import PromptRequest
from zrt.runtime.messages.sampling import (
    SAMPLING_OPTIONS,
    Sampling,
    SamplingKeywords,
    SamplingOption,
    sampling_fields,
    stage_sampling,
)
from zrt.runtime.models.architecture.generation_config import generation_defaults
from zrt.runtime.wire.clients import decode_client
from zrt.runtime.wire.decode_errors import WireError

NAMES = [option.name for option in SAMPLING_OPTIONS]

RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, 2**40], [0, -1]),
    "temperature": ([0.0, 0.7, 1000.0], [-0.1, 1000.5, math.nan, math.inf]),
    "top_k": ([0, 40, 2**31 - 1], [-1, 2**31]),
    "top_p": ([1e-9, 0.5, 1.0], [0.0, -0.5, 1.01, math.nan]),
    "min_p": ([0.0, 0.5, 1.0], [-0.01, 1.5, math.nan]),
    "repetition_penalty": ([0.01, 1.3, 1000.0], [0.0, 0.001, 1001.0, math.inf]),
    "presence_penalty": ([-2.0, 0.5, 2.0], [-2.1, 2.1, math.nan]),
    "frequency_penalty": ([-2.0, 0.5, 2.0], [-2.1, 2.1, math.nan]),
    "logit_bias": (
        [{5: -100.0}, {5: 1.5, 7: 100.0}, {2**32 - 1: 1.0}],
        [{5: 101.0}, {5: -100.5}, {2**32: 1.0}, {-1: 1.0}, {5: math.nan}, dict.fromkeys(range(1025), 1.0)],
    ),
    "min_tokens": ([0, 7, 2**32 - 1], [-1, 2**32]),
    "ignore_eos": ([True], []),
    "stop": ([["a"], ["a", "b" * 256], ["a"] * 64], [[""], ["a", "b" * 257], ["a"] * 65]),
    "stop_token_ids": ([[0], [5, 2**32 - 1], [5] * 256], [[-1], [2**32], [5] * 257]),
    "logprobs": ([0, 20], [-1, 21]),
    "seed": ([0, 2**63 - 1], [-1, 2**63]),
    "n": ([1, 16], [0, 17]),
}
"""Values that every place takes, and values that every place refuses."""
TAKEN = [(option, value) for option in SAMPLING_OPTIONS for value in RANGES[option.name][0]]
REFUSED = [(option, value) for option in SAMPLING_OPTIONS for value in RANGES[option.name][1]]


def name_of(case: object) -> str:
    return case.name if isinstance(case, SamplingOption) else repr(case)[:24]


def words(option: SamplingOption, value: Any) -> list[str]:
    """How the command line says it."""
    if value is True:
        return [option.flag]
    if isinstance(value, dict):
        return [f"{option.flag}={token}:{bias}" for token, bias in value.items()]
    return [f"{option.flag}={each}" for each in (value if isinstance(value, list) else [value])]


def of_the_command_line(option: SamplingOption, value: Any) -> dict[str, Any]:
    """What the options of `zrt generate` come to. SystemExit or ZrtError: they are refused."""
    return given_sampling(command_line().parse_args(["generate", "hi", *words(option, value)]))


def frame(option: SamplingOption, value: Any) -> bytes:
    return msgspec.msgpack.encode({"type": "generate", "id": "7", option.name: value})


def test_the_fields_of_the_request_are_the_rows_of_the_table_and_of_their_types() -> None:
    own = [field for field in fields(Generate) if field.name not in PromptRequest.__struct_fields__]
    assert [field.name for field in own] == NAMES == list(SamplingKeywords.__annotations__)
    for field, option in zip(own, SAMPLING_OPTIONS, strict=True):
        types = [kind for kind in get_args(field.type) if kind is not type(None)] if field.default is None else []
        assert option.type in (field.type, *types), option.name


def test_what_the_last_stage_is_told_are_options_too_and_neutral_by_default() -> None:
    assert set(Sampling.__struct_fields__) <= set(NAMES)
    assert stage_sampling(Generate(id="7"), Sampling()) == Sampling()


def test_the_ranges_of_this_test_are_of_every_option() -> None:
    assert list(RANGES) == NAMES


@pytest.mark.parametrize(("option", "value"), TAKEN, ids=name_of)
def test_a_value_in_range_is_taken_everywhere(option: SamplingOption, value: Any) -> None:
    assert of_the_command_line(option, value) == {option.name: value}
    assert sampling_fields({option.name: value}) == {option.name: value}
    request = decode_client(frame(option, value))
    assert getattr(request, option.name) == value
    if option.name in Sampling.__struct_fields__:
        assert getattr(stage_sampling(request, Sampling()), option.name) == value


@pytest.mark.parametrize(("option", "value"), REFUSED, ids=name_of)
def test_a_value_out_of_range_is_refused_everywhere_by_name(
    option: SamplingOption, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ZrtError)) as caught:
        of_the_command_line(option, value)
    said = capsys.readouterr().err if isinstance(caught.value, SystemExit) else str(caught.value)
    assert option.flag in said
    with pytest.raises(WireError) as at_the_coordinator:
        decode_client(frame(option, value))
    assert re.search(rf"(generate|\$)\.{option.name}\b", str(at_the_coordinator.value))
    with pytest.raises(ZrtError) as at_the_client:
        sampling_fields({option.name: value})
    assert str(at_the_client.value) == str(at_the_coordinator.value)


@pytest.mark.parametrize("option", SAMPLING_OPTIONS, ids=name_of)
def test_every_option_is_a_word_of_the_commands_that_ask(option: SamplingOption) -> None:
    assert option.flag in command_help("generate")
    assert option.flag in command_help("up")
    assert (option.flag in command_help("chat")) == (option.name not in ("logprobs", "n"))


def command_help(name: str) -> set[str]:
    """The options of a command."""
    parser = argparse.ArgumentParser(prog=name)
    load(name).add_arguments(parser)
    assert all(action.help for action in parser._actions)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("option", [option for option in SAMPLING_OPTIONS if option.generation_config], ids=name_of)
def test_a_models_own_default_counts_until_a_request_says_something_else(
    option: SamplingOption, tmp_path: Path
) -> None:
    told, asked = RANGES[option.name][0][:2]
    write_generation_config(tmp_path, option, told)
    defaults = generation_defaults(tmp_path)
    if option.name not in Sampling.__struct_fields__:
        assert getattr(defaults, option.name) == told
        return
    silent, request = Generate(id="7"), Generate(id="7", **{option.name: asked})
    assert getattr(stage_sampling(silent, defaults.sampling), option.name) == told
    assert getattr(stage_sampling(request, defaults.sampling), option.name) == asked


@pytest.mark.parametrize("option", [option for option in SAMPLING_OPTIONS if option.generation_config], ids=name_of)
def test_a_models_own_default_out_of_range_is_refused(option: SamplingOption, tmp_path: Path) -> None:
    write_generation_config(tmp_path, option, -1 if option.name != "repetition_penalty" else 0)
    with pytest.raises(ZrtError, match=f"bad_model: .*{option.generation_config}"):
        generation_defaults(tmp_path)


def write_generation_config(folder: Path, option: SamplingOption, value: object) -> None:
    text = json.dumps({"do_sample": True, option.generation_config: value})
    (folder / "generation_config.json").write_text(text)


def test_what_is_no_option_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(TypeError, match=r"'temprature' is not an option .* temperature"):
        Client("tcp://127.0.0.1:1").generate("hi", temprature=0.5)  # type: ignore[call-arg]


def test_none_and_any_sequence_or_mapping_are_taken_by_the_client() -> None:
    given = {"temperature": None, "stop": ("a",), "stop_token_ids": (), "logit_bias": {}, "n": 2}
    assert sampling_fields(given) == {"stop": ["a"], "stop_token_ids": [], "logit_bias": {}, "n": 2}
