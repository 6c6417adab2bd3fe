"""Command-line arguments for the options of a generation, made from the table in
messages/sampling.py."""

import argparse
from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any, Final, get_args, get_origin

from msgspec import Meta

from zrt.runtime.cli import argument_types
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import SAMPLING_OPTIONS, SamplingOption

_NO_LIMITS: Final = Meta()
_TELLING: Final = 1000
"""The largest limit that `--help` shows: higher limits come from the size of a number alone."""


def add_sampling_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add the arguments for the options of a generation, except those called `without`."""
    for option in SAMPLING_OPTIONS:
        if option.name not in without:
            parser.add_argument(option.flag, dest=option.name, help=_help(option), **_settings(option))


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options, as keywords of Client.generate. ZrtError bad_config: an option was
    given too often."""
    given: dict[str, Any] = {}
    for option in SAMPLING_OPTIONS:
        value = getattr(arguments, option.name, None)
        if value not in (None, []):
            given[option.name] = _collected(option, value)
    return given


def _collected(option: SamplingOption, value: Any) -> Any:
    kind, limits = _unwrapped(option.type)
    if limits.max_length is not None and len(value) > limits.max_length:
        raise ZrtError("bad_config", f"{option.flag} may be given {limits.max_length} times at most")
    if get_origin(kind) is not dict:
        return value
    by_key = dict(value)
    if len(by_key) < len(value):
        raise ZrtError("bad_config", f"{option.flag} names a token twice")
    return by_key


def _settings(option: SamplingOption) -> dict[str, Any]:
    """Return an option's settings for argparse besides its name and its help."""
    kind, _ = _unwrapped(option.type)
    if kind is bool:
        return {"action": "store_true", "default": None}
    settings: dict[str, Any] = {"metavar": option.metavar, "type": _reader(option.type)}
    if get_origin(kind) in (list, dict):
        settings |= {"action": "append", "default": []}
    return settings


def _reader(annotated: Any) -> Callable[[str], Any]:
    """Return the argparse type of a value, or of one item of several."""
    kind, limits = _unwrapped(annotated)
    if kind is int:
        return partial(argument_types.whole, least=limits.ge or 0, most=limits.le)
    if kind is float:
        return partial(argument_types.real, least=limits.ge, above=limits.gt, most=limits.le)
    if kind is str:
        return partial(argument_types.text, least=limits.min_length or 0, most=limits.max_length)
    if get_origin(kind) is list:
        return _reader(get_args(kind)[0])
    key, value = get_args(kind)
    return partial(argument_types.pair, key=_reader(key), value=_reader(value))


def _help(option: SamplingOption) -> str:
    """Return an option's help: the text of its row, with the range and the default."""
    kind, _ = _unwrapped(option.type)
    notes = [_range(option.type)]
    if get_origin(kind) in (list, dict):
        notes.append("repeatable")
    if option.generation_config:
        notes.append("default: the model's")
    told = "; ".join(filter(None, notes))
    return f"{option.help} ({told})" if told else option.help


def _range(annotated: Any) -> str:
    kind, limits = _unwrapped(annotated)
    if get_origin(kind) is dict:
        return _range(get_args(kind)[1])
    if limits.le is None or limits.le > _TELLING:
        return ""
    return f"{limits.ge:g} to {limits.le:g}" if limits.gt is None else f"above {limits.gt:g}, to {limits.le:g}"


def _unwrapped(annotated: Any) -> tuple[Any, Any]:
    """Return a type and its limits: msgspec's Meta."""
    if get_origin(annotated) is not Annotated:
        return annotated, _NO_LIMITS
    kind, limits = get_args(annotated)
    return kind, limits
