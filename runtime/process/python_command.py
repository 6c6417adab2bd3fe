"""How a child that runs Python is started: with which command, in which folder, and with which
environment.

A child imports only what is installed: neither the folder where its parent was started nor the one
it runs in is searched for modules. It runs in a folder that is always there, so whatever a parent
was given as a relative path is absolute before a child gets it.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

FOLDER: Final = "/"
"""The folder that every child runs in."""

FILES: Final = (
    "ZRT_HOME",
    "HOME",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_ASSETS_CACHE",
    "HF_XET_CACHE",
    "HF_TOKEN_PATH",
    "NUMBA_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_HOME",
    "CUDA_CACHE_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CONFIG_FILE",
    "PIP_CERT",
)
"""Variables that hold one path and that zrt, or a library it uses, reads."""

SEARCHED: Final = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH")
"""Variables that hold folders to search, with a colon between two."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a child, by this very Python. The child is to run in
    `FOLDER`, with the `environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `ours` for a process in another folder: each relative path in it made
    absolute, from the folder that we are in.

    An empty entry of a list of folders to search stands for whatever folder one is in, and is left
    out. Where our own folder is gone, relative paths stay as they are.
    """
    settled = dict(ours)
    for name in FILES:
        if path := ours.get(name):
            settled[name] = _absolute(path)
    for name in SEARCHED:
        if searched := ours.get(name):
            settled[name] = os.pathsep.join(_absolute(path) for path in searched.split(os.pathsep) if path)
    return settled


def _absolute(path: str) -> str:
    if path.startswith("~"):
        return path
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        return path
