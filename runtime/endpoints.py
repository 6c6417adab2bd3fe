"""Endpoints as people write them: tcp://HOST:PORT."""

import ipaddress
import re
from typing import Final

from zrt.runtime.errors import ZrtError

WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})
"""Hosts that name every interface of a machine, and so none that others could connect to."""
_ENDPOINT: Final = re.compile(
    r"tcp://(?:\[([0-9A-Fa-f:.]+(?:%[^\s/\]]+)?)\]|([^\s:/\[\]@?#]+))(?::(\d{0,5}|\*))?", re.ASCII | re.IGNORECASE
)


def split_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of "tcp://HOST[:PORT]"; the port is 0 where it is missing or "*".

    An IPv6 host is returned without its brackets, the host "*" as "0.0.0.0". Raises ZrtError
    bad_config.
    """
    match = _ENDPOINT.fullmatch(text)
    port = 0 if match is None or match[3] in (None, "", "*") else int(match[3])
    if match is None or port > 65535:
        raise ZrtError("bad_config", f"{text!r} is not an endpoint: expected tcp://HOST:PORT")
    host = (match[1] or match[2]).lower()
    return ("0.0.0.0" if host == "*" else host), port


def endpoint(text: str) -> tuple[str, int]:
    """Return the host, as written, and the port of an endpoint whose port is a number. Raises
    ValueError."""
    match = _ENDPOINT.fullmatch(text)
    if (
        match is None
        or not text.startswith("tcp://")
        or match[3] in (None, "", "*")
        or "%" in text
        or int(match[3]) > 65535
    ):
        raise ValueError(f'{text!r} is no endpoint; write tcp://HOST:PORT, such as "tcp://127.0.0.1:7411"')
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(text: str) -> tuple[str, int]:
    """Return the host and port (0: not given) that others are told to connect to. Raises
    ValueError."""
    try:
        host, port = split_endpoint(text)
    except ZrtError:
        raise ValueError(f"{text!r} cannot be advertised; write tcp://HOST or tcp://HOST:PORT") from None
    if host in WILDCARDS:
        raise ValueError(f"{text!r} cannot be advertised: it names no host")
    return host, port


def port_unknown(advertise: str | None, listen: str) -> str:
    """Return an error message if `advertise` names a port while `listen` leaves its port to the
    system, else ""."""
    if advertise is None or not advertised(advertise)[1] or endpoint(listen)[1]:
        return ""
    return f"{advertise} names a port, but {listen} leaves its own to the system: leave out the one, or name the other"
