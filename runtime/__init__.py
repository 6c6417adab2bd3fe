"""zrt's runtime: what the processes in actors/ are made of. Scripts need `Client` and `ZrtError`.

The files here are the base that every room may import:

- errors.py: errors as values: kind, message, where
- endpoints.py: endpoints as people write them
- formatting.py: amounts in words
- version.py: the release of zrt that runs
- paths.py: the folder of zrt's files on this machine, and paths as people write them
- model_files.py: the files of a model's folder, each opened in one way
- whole_files.py: files that several processes share, replaced whole, and locks
- hard_exit.py: the end of a process that does not wait for its threads
- host_memory.py: memory of this machine that a new process may take
- watchdog.py: blocking calls, given up when they take too long
- page_keys.py: keys of KV pages by the tokens they hold

The rooms, from the bottom of the import order up:

- messages/: every message, grouped by who receives it
- wire/: messages as bytes, and back
- text/: text and token ids
- process/: child processes and their logs
- transport/: ZeroMQ sockets
- models/: models as files; no torch
- convert/: conversion of other weight formats; needs torch
- cluster/: cluster files, plans and memory
- compute/: tensors
- actor/: what every actor is made of
- client/: the scripted client
- cli/: the command line
"""

from typing import TYPE_CHECKING

from zrt.runtime.errors import ZrtError

if TYPE_CHECKING:
    from zrt.runtime.client.client import Client

__all__ = ["Client", "ZrtError"]


def __getattr__(name: str) -> object:
    """Import `Client` only when it is asked for: a child process that has yet to hold its lifeline
    should not wait for that import."""
    if name == "Client":
        from zrt.runtime.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
