"""Endpoints as people write them."""

import ipaddress
import re


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of "tcp://HOST:PORT"; an IPv6 host stands in brackets, which are taken off.
    Raises ValueError."""
    match = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f'{text!r} is no endpoint; write tcp://HOST:PORT, such as "tcp://127.0.0.1:7411"')
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(text: str) -> tuple[str, int]:
    """Host and port (0: not given) of "tcp://HOST" or "tcp://HOST:PORT", for others to connect to.
    Raises ValueError."""
    try:
        host, port = endpoint(text)
    except ValueError:
        try:
            host, port = endpoint(f"{text}:0")
        except ValueError:
            raise ValueError(f"{text!r} cannot be advertised; write tcp://HOST or tcp://HOST:PORT") from None
    if host in ("*", "0.0.0.0", "::"):
        raise ValueError(f"{text!r} cannot be advertised: it names no host")
    return host, port


def port_unknown(advertise: str | None, listen: str) -> str:
    """What is wrong if a port is advertised, but any is listened on: nobody could lead the one to
    the other."""
    if advertise is None or not advertised(advertise)[1] or endpoint(listen)[1]:
        return ""
    return f"{advertise} names a port, but {listen} leaves its own to the system: leave out the one, or name the other"
