"""Types of command-line arguments, as argparse calls the functions that read and check them. Each
raises ArgumentTypeError for a text that it does not take."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from zrt.runtime.messages.prompt import TemplateValue

_LARGEST: Final = 2**63 - 1


def whole(text: str, *, least: int, most: int | None = None) -> int:
    """Read a whole number from `least` to `most`, or to the largest that can be sent."""
    most = _LARGEST if most is None else most
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= number <= most:
        above = "too large" if most == _LARGEST else f"not {most} or less"
        raise argparse.ArgumentTypeError(f"{text} is not {least} or more" if number < least else f"{text} is {above}")
    return number


def word(text: str) -> str:
    """Check that a text is not empty. An empty one mostly comes from a variable that is not set,
    and does not mean the default."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; leave it out where the default is meant")
    return text


def path(text: str) -> Path:
    """Read the path of a file."""
    return Path(word(text))


def prompt(given: str) -> str:
    """Read a prompt, or the "-" in place of one."""
    return text(given, least=1)


def name(text: str) -> str:
    """Read a name as a cluster file spells it."""
    from zrt.runtime.cluster.file_schema import NAME  # imported here, since few commands need it

    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name: it has to match {NAME}")
    return text


def device(text: str) -> str:
    """Read a device as a cluster file spells it."""
    from zrt.runtime.cluster import file_schema

    try:
        return file_schema.device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Read a whole number from 1."""
    return whole(text, least=1)


def count(text: str) -> int:
    """Read a whole number from 0."""
    return whole(text, least=0)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def real(text: str, *, least: float | None = None, above: float | None = None, most: float) -> float:
    """Read a number from `least`, or above `above`, to `most`."""
    number = _real(text)
    if above is not None and not above < number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not above {above:g} and at most {most:g}")
    if least is not None and not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
    return number


def pair(text: str, *, key: Callable[[str], int], value: Callable[[str], float]) -> tuple[int, float]:
    """Read a token id and a number, such as "15:-2.5"."""
    token, _, number = text.partition(":")
    try:
        found = key(token), _real(number)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS, such as 15:-2.5") from None
    return found[0], value(number)


def template_option(given: str) -> tuple[str, bool | int | float | str]:
    """Read a name and a value, such as "enable_thinking=false": true, false, a number, else a
    text, which may be in double quotes."""
    option, equals, value = text(given).partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", option):
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=VALUE, such as enable_thinking=false")
    if value.lower() in ("true", "false"):
        return option, value.lower() == "true"
    try:
        return option, msgspec.json.decode(value, type=TemplateValue)
    except msgspec.DecodeError:
        return option, text(value, most=4096)


def text(given: str, *, least: int = 0, most: int | None = None) -> str:
    """Check that a text can be sent (a command line may hold any bytes), and its length in
    characters."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None
    if len(given) < least:
        raise argparse.ArgumentTypeError("the text is empty")
    if most is not None and len(given) > most:
        raise argparse.ArgumentTypeError(f"the text is longer than {most} characters")
    return given


def ids(text: str) -> list[int]:
    """Read token ids, such as "1,2,3"."""
    try:
        return [whole(part, least=0, most=2**32 - 1) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def seconds(text: str) -> float:
    """Read seconds, a day at most."""
    if not 0 <= (number := _real(text)) <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return number


def size(text: str) -> int:
    """Read a number of bytes as a cluster file spells it, such as 8GiB."""
    from zrt.runtime.cluster import toml_tables

    try:
        return toml_tables.size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def session(text: str) -> int:
    """Read a session id: 16 hexadecimal digits, as it is shown everywhere."""
    if not re.fullmatch("[0-9A-Fa-f]{16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a session id: `zrt status` shows them")
    return int(text, 16)
