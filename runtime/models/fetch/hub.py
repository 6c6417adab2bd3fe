"""Models of the Hugging Face hub, through huggingface_hub's cache, which other programs on the
machine share.

Such a program may have fetched a part of a model only, and the cache does not tell. What the hub
lists is therefore noted in zrt's own folder, once for each snapshot: with the note a snapshot is
known to be whole without asking.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import msgspec

from zrt.runtime import paths
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch.download_progress import POLL_S, Growth, Progress, Say
from zrt.runtime.watchdog import beside
from zrt.runtime.whole_files import write_whole

ANSWER_S: Final = 8.0
"""Seconds for the hub to list a model's files, including connecting, resolving names and all
retries."""
IGNORED: Final = ["*/*", "consolidated*"]
"""Files that are not fetched: other formats in sub-folders, and the second copy of the weights that
some models carry."""
TEXT: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files that nearly every model has and none needs: without them it answers otherwise, or takes
token ids only."""
TEMPLATE: Final = "chat_template.jinja"


class Listing(msgspec.Struct, frozen=True):
    """The files of a model by their names, with their bytes, as the hub lists them at one
    commit."""

    commit: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a model: its *.json and *.jinja files, and its *.safetensors if
    `weights`."""

    weights: bool

    @property
    def patterns(self) -> list[str]:
        return ["*.json", "*.jinja", *(["*.safetensors"] if self.weights else [])]

    def of(self, listing: Listing) -> dict[str, int]:
        """Return the wanted ones of the files, with their bytes."""
        return {
            name: size
            for name, size in listing.files.items()
            if _matches(name, self.patterns) and not _matches(name, IGNORED)
        }


def hub_folder(ref: str, *, weights: bool, text: bool, progress: Progress, say: Say) -> Path:
    """Return the snapshot folder of the model `ref` ("owner/name") with its *.json and *.jinja
    files and, if `weights`, its *.safetensors.

    The hub is not asked for a snapshot in the cache that is known to be whole, nor, unless `text`,
    for one that has config and weights. Where it cannot be asked, such a snapshot is taken, and
    `say` is told what it lacks. Errors: bad_model.
    """
    wanted = Wanted(weights)
    cached = cached_folder(ref)
    noted = None if cached is None else _noted(ref, cached.name)
    short = "config.json" if cached is None else lacking(cached, weights)
    if cached is not None and text and not short and noted is not None:
        short = next(iter(_absent(cached, wanted.of(noted))), None)
    if cached is not None and not short and (noted is not None or not text):
        return cached
    try:
        with _hub_errors(ref, short):
            listing = _listing(ref, cached)
    except ZrtError as error:
        if cached is None or short:
            raise
        if absent := _absent_text(cached):
            say(f"{error.message.partition(';')[0]}; it is used without {', '.join(absent)}")
        return cached
    if cached is None or cached.name != listing.commit or _absent(cached, wanted.of(listing)):
        missing = "config.json" if cached is None else next(iter(_absent(cached, wanted.of(listing))), short)
        with _hub_errors(ref, missing):
            cached = _download(ref, wanted, listing, None if cached is None else cached.name, progress)
    if short := lacking(cached, weights):
        raise ZrtError("bad_model", f"{ref} has no {short}, which zrt needs")
    if cached.name == listing.commit:
        if absent := _absent(cached, wanted.of(listing)):
            raise ZrtError("bad_model", f"{', '.join(absent)} of {ref} could not be fetched; try again")
        _note(ref, listing)
    return cached


def lacking(folder: Path, weights: bool) -> str | None:
    """Return the first file that a model cannot do without and that its folder lacks; None if it
    has all."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not weights or (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return f"model.safetensors or {index.name}"
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"readable {index.name}"
    return next((name for name in sorted(files) if not (folder / name).is_file()), None)


def cached_folder(ref: str) -> Path | None:
    """Return the model's snapshot folder in the cache, whole or not; None if it has no config.json,
    or there is no such folder. ZrtError bad_config: there is no place for a cache; bad_model: the
    hub has no such ids."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        paths.expanded(constants.HF_HUB_CACHE)  # the library itself would make a folder called ~
    except ZrtError as error:
        text = f"the cache of huggingface_hub is {error.message}: set HF_HOME to a folder"
        raise ZrtError("bad_config", text) from None
    try:
        config = huggingface_hub.try_to_load_from_cache(ref, "config.json")
    except HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise ZrtError("bad_model", f"no model {ref!r}: it is no folder, and no id of the hub: {reason}") from None
    return Path(config).parent if isinstance(config, str) else None


def _absent(folder: Path, files: Mapping[str, int]) -> list[str]:
    return [name for name in sorted(files) if not (folder / name).is_file()]


def _absent_text(folder: Path) -> list[str]:
    """Return what nearly every model has and this folder does not."""
    absent = [name for name in TEXT if not (folder / name).is_file()]
    with suppress(OSError):
        if (folder / TEMPLATE).is_file() or b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes():
            return absent
    return [*absent, TEMPLATE]


def _listing(ref: str, cached: Path | None) -> Listing:
    """Return what the hub lists, at the commit in the cache if it still has that. TimeoutError
    where it does not answer; the library's errors pass through."""
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    asked = time.monotonic()

    def waiting() -> None:
        if time.monotonic() - asked > ANSWER_S:
            raise TimeoutError(f"no answer in {ANSWER_S:.0f} s")

    def ask() -> Any:
        api = huggingface_hub.HfApi()
        if cached is not None:
            with suppress(RevisionNotFoundError):
                return api.model_info(ref, revision=cached.name, files_metadata=True, timeout=ANSWER_S)
        return api.model_info(ref, files_metadata=True, timeout=ANSWER_S)

    info = beside("hub", ask, waiting, POLL_S)
    return Listing(info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()})


def _download(ref: str, wanted: Wanted, listing: Listing, cached: str | None, progress: Progress) -> Path:
    """Fetch the wanted files of the listing into the cache, where `cached` is the commit that is
    there. TimeoutError where no more bytes arrive; the library's errors pass through."""
    import huggingface_hub
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    growth = Growth(Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{ref.replace('/', '--')}" / "blobs")
    total = sum(wanted.of(listing).values())

    def downloading() -> None:
        progress(min(growth.look(), total), total, f"downloading {ref}")
        if growth.stalled:
            raise TimeoutError("the download stalled")

    def fetch() -> str:
        # a commit that is cached is completed; else the newest comes, known as such to the cache
        revision = listing.commit if listing.commit == cached else None
        return huggingface_hub.snapshot_download(
            ref, revision=revision, tqdm_class=Silent, allow_patterns=wanted.patterns, ignore_patterns=IGNORED
        )

    return Path(beside("hub", fetch, downloading, POLL_S))


def _noted(ref: str, commit: str) -> Listing | None:
    """Return what the hub has listed at this commit; None where it has not been asked."""
    with suppress(OSError, ZrtError, msgspec.DecodeError):
        listing = msgspec.json.decode(_note_file(ref).read_bytes(), type=Listing)
        return listing if listing.commit == commit else None
    return None


def _note(ref: str, listing: Listing) -> None:
    """Note what the hub lists. Where that cannot be written the hub is asked again."""
    with suppress(OSError, ZrtError):
        file = _note_file(ref)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode(listing))


def _note_file(ref: str) -> Path:
    return paths.home() / "hub" / f"{ref.replace('/', '--')}.json"


@contextmanager
def _hub_errors(ref: str, short: str | None) -> Iterator[None]:
    """Raise the library's errors as ZrtError bad_model, which says what to do. `short` is a file
    that the cache lacks; None: none is known to be missing."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ZrtError("bad_model", f"{ref} is gated: accept its terms on its page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ZrtError("bad_model", f"the hub has no model {ref}, or HF_TOKEN may not read it") from error
    except Exception as error:  # the library raises its HTTP client's errors, which differ from version to version
        reason = str(error).partition("\n")[0] or type(error).__name__
        whole = f"is not whole in the cache of huggingface_hub ({short} is missing)" if short else "may not be whole"
        raise ZrtError(
            "bad_model",
            f"{ref} {whole} and the hub cannot be asked ({reason}); "
            "connect to it once, name a model folder, or use the demo model",
        ) from error


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
