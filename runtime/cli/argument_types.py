"""Words of the command line, each read and checked: what argparse calls a type. They raise
ArgumentTypeError."""

import argparse
import re
from typing import Final

_LARGEST: Final = 2**63 - 1


def _number(text: str, least: int, most: int = _LARGEST) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= number <= most:
        above = "too large" if most == _LARGEST else f"not {most} or less"
        raise argparse.ArgumentTypeError(f"{text} is not {least} or more" if number < least else f"{text} is {above}")
    return number


def name(text: str) -> str:
    """A name as a cluster file has it."""
    from zrt.runtime.cluster.file_schema import NAME  # it is not for every command

    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of the pattern {NAME}")
    return text


def device(text: str) -> str:
    """A device as a cluster file has it."""
    from zrt.runtime.cluster import file_schema

    try:
        return file_schema.device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A whole number from 1."""
    return _number(text, 1)


def count(text: str) -> int:
    """A whole number from 0."""
    return _number(text, 0)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def temperature(text: str) -> float:
    """A number from 0."""
    if not 0 <= (number := _real(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def share(text: str) -> float:
    """A number above 0, at most 1."""
    if not 0 < (number := _real(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def floor(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (number := _real(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def factor(text: str) -> float:
    """A number from 0.01 to 1000."""
    if not 0.01 <= (number := _real(text)) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 1000")
    return number


def penalty(text: str) -> float:
    """A number from -2 to 2."""
    if not -2 <= (number := _real(text)) <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not between -2 and 2")
    return number


def bias(text: str) -> tuple[int, float]:
    """A token id and a number from -100 to 100: "15:-2.5"."""
    token, _, number = text.partition(":")
    try:
        found = _number(token, 0, 2**32 - 1), _real(number)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS, such as 15:-2.5") from None
    if not -100 <= found[1] <= 100:
        raise argparse.ArgumentTypeError(f"{number} is not between -100 and 100")
    return found


def token(text: str) -> int:
    """A token id."""
    return _number(text, 0, 2**32 - 1)


def likeliest(text: str) -> int:
    """How many of the likeliest tokens: 0 to 20."""
    return _number(text, 0, 20)


def answers(text: str) -> int:
    """How many answers: 1 to 16."""
    return _number(text, 1, 16)


def text(given: str) -> str:
    """Text that can be sent: a command line may hold any bytes."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it is not UTF-8") from None
    return given


def stop(given: str) -> str:
    """Text that is not empty."""
    if not given:
        raise argparse.ArgumentTypeError("it is empty")
    return text(given)


def ids(text: str) -> list[int]:
    """Token ids: "1,2,3"."""
    try:
        return [_number(part, 0, 2**32 - 1) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def seconds(text: str) -> float:
    """Seconds of at most a day."""
    if not 0 <= (number := _real(text)) <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return number


def size(text: str) -> int:
    """Bytes as a cluster file writes them: 8GiB."""
    from zrt.runtime.cluster import toml_tables

    try:
        return toml_tables.size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def session(text: str) -> int:
    """A session id: 16 hexadecimal digits, as it is shown everywhere."""
    if not re.fullmatch("[0-9A-Fa-f]{16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a session id: `zrt status` shows them")
    return int(text, 16)
