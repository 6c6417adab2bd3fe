"""Models of the Hugging Face hub, through huggingface_hub's cache, which other programs on the
machine share."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch.download_progress import POLL_S, Growth, Progress
from zrt.runtime.watchdog import beside

ANSWER_S: Final = 8.0
"""Seconds for the hub to list a model's files, including connecting, resolving names and all
retries."""
IGNORED: Final = ["*/*", "consolidated*"]
"""Files that are not fetched: other formats in sub-folders, and the second copy of the weights that
some models carry."""


def hub_folder(ref: str, weights: bool, progress: Progress) -> Path:
    """Return the snapshot folder of the model `ref` ("owner/name") with its *.json and *.jinja
    files and, if `weights`, its *.safetensors.

    A snapshot that is whole in the cache is taken without asking the hub. Errors: bad_model.
    """
    wanted = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    cached = _cached(ref, wanted)
    if cached is not None and lacking(cached, weights) is None:
        return cached
    with _hub_errors(ref):
        folder = _download(ref, wanted, _size(ref, wanted), progress)
    if (absent := lacking(folder, weights)) is not None:
        raise ZrtError("bad_model", f"{ref} has no {absent}, which zrt needs")
    return folder


def _cached(ref: str, wanted: list[str]) -> Path | None:
    """Return the snapshot folder in the cache, whole or not, or None."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return Path(
            huggingface_hub.snapshot_download(
                ref, local_files_only=True, allow_patterns=wanted, ignore_patterns=IGNORED
            )
        )
    return None


def _size(ref: str, wanted: list[str]) -> int:
    """Return the bytes of the model's wanted files, as the hub says. TimeoutError where the hub
    does not answer; the library's errors pass through."""
    import huggingface_hub

    asked = time.monotonic()

    def waiting() -> None:
        if time.monotonic() - asked > ANSWER_S:
            raise TimeoutError(f"no answer in {ANSWER_S:.0f} s")

    api = huggingface_hub.HfApi()
    info = beside("hub", lambda: api.model_info(ref, files_metadata=True, timeout=ANSWER_S), waiting, POLL_S)
    files = [file for file in info.siblings or () if _matches(file.rfilename, wanted)]
    return sum(file.size or 0 for file in files if not _matches(file.rfilename, IGNORED))


def _download(ref: str, wanted: list[str], total: int, progress: Progress) -> Path:
    """Fetch the wanted files, `total` bytes, into the cache. TimeoutError where no more bytes
    arrive; the library's errors pass through."""
    import huggingface_hub
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    growth = Growth(Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{ref.replace('/', '--')}" / "blobs")

    def downloading() -> None:
        progress(min(growth.look(), total), total, f"downloading {ref}")
        if growth.stalled:
            raise TimeoutError("the download stalled")

    def fetch() -> str:
        return huggingface_hub.snapshot_download(ref, tqdm_class=Silent, allow_patterns=wanted, ignore_patterns=IGNORED)

    return Path(beside("hub", fetch, downloading, POLL_S))


@contextmanager
def _hub_errors(ref: str) -> Iterator[None]:
    """Raise the library's errors as ZrtError bad_model, which says what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ZrtError("bad_model", f"{ref} is gated: accept its terms on its page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ZrtError("bad_model", f"the hub has no model {ref}, or HF_TOKEN may not read it") from error
    except Exception as error:  # the library raises its HTTP client's errors, which differ from version to version
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ZrtError(
            "bad_model",
            f"{ref} is not whole in the cache of huggingface_hub and the hub cannot be asked ({reason}); "
            "connect to it once, name a model folder, or use the demo model",
        ) from error


def lacking(folder: Path, weights: bool) -> str | None:
    """Return the first file that a model folder needs and does not have; None if it has all."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not weights:
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"readable {index.name}"
        return next((name for name in sorted(files) if not (folder / name).is_file()), None)
    return None if any(folder.glob("*.safetensors")) else "*.safetensors file"


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
