"""The resolver of model references: a folder, a demo name or a hub id becomes a folder of files."""

import os
import re
from pathlib import Path
from typing import Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.model_files import has_model_file
from zrt.runtime.models.fetch.demo import NAME as DEMO
from zrt.runtime.models.fetch.demo import demo_folder, demo_place
from zrt.runtime.models.fetch.download_progress import Progress, Say, ignore, say_nothing
from zrt.runtime.models.fetch.hub import cached_folder, hub_folder
from zrt.runtime.paths import expanded, home

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
WAYS: Final = f"a model is the demo {DEMO}, a folder, or a hub id such as owner/name"


def resolve(
    ref: str,
    *,
    zrt_home: Path | None = None,
    weights: bool = True,
    text: bool = True,
    progress: Progress = ignore,
    say: Say = say_nothing,
) -> Path:
    """Return the folder that holds the model called `ref`, fetched into a cache if need be.

    Blocks on disk and network. `weights=False` is for random weights: from the hub it fetches all
    but the weights. `text=False` is for whoever needs config and weights alone, so that the hub is
    not asked for more than the cache holds. `say` is told what a model lacks that is taken without
    the hub. Errors: bad_model, with the ref and the ways out; within 10 s if there is no network to
    the hub.
    """
    if ref == DEMO:
        return demo_folder(zrt_home or home(), progress)
    folder = local_folder(ref)
    if folder is not None:
        if not has_model_file(folder / "config.json"):
            raise ZrtError("bad_model", f"the folder {ref} has no config.json, so it is no model; {WAYS}")
        return folder.resolve()
    if ref and os.path.isfile(file := expanded(ref)):
        hint = f"; `zrt plan {ref}` looks at a cluster file" if file.suffix == ".toml" else ""
        raise ZrtError("bad_model", f"{ref} is a file{hint}; {WAYS}")
    if not HUB_ID.fullmatch(ref):
        raise ZrtError("bad_model", f"no model {ref!r}: neither a folder nor a hub id; {WAYS}")
    return hub_folder(ref, weights=weights, text=text, progress=progress, say=say)


def local_folder(ref: str) -> Path | None:
    """Return the folder that `ref` names by its path; None for any other reference: the demo's name
    is one even where a folder is called so. ZrtError bad_config: the path is in no home
    directory."""
    if not ref or ref == DEMO:
        return None
    folder = expanded(ref)
    return folder if os.path.isdir(folder) else None


def place_of(ref: str) -> Path | None:
    """Return the folder that `resolve` reads the model from, whether there is one now or not; None
    for a model of the hub that is not in the cache. Asks nobody. ZrtError as for `resolve`."""
    if ref == DEMO:
        return demo_place(home())
    if local_folder(ref) is None and HUB_ID.fullmatch(ref):
        return cached_folder(ref)
    return expanded(ref)
