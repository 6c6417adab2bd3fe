"""Endpoints as people write them."""

import ipaddress
import re


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of "tcp://HOST:PORT"; an IPv6 host stands in brackets, which are taken off. Raises ValueError."""
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
