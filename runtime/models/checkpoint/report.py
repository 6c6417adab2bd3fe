"""Report on the model in a folder: what it is and whether zrt can run it, from config, headers and
tokenizer, before any process starts. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Final

import msgspec

from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import counted
from zrt.runtime.models.architecture.generation_config import eos_ids, generation_defaults
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.index import CheckpointIndex, Problem
from zrt.runtime.models.checkpoint.layout import HEAD, shard_shapes
from zrt.runtime.text.tokenizer import Tokenizer

SHOWN: Final = 8
"""The most problems in one error's message, and the most names in a note."""


class Report(msgspec.Struct):
    """A model as it was found. What could not be told is None; `weight_bytes` and `dtypes` count
    the tensors that are used, as they lie in the files; `context` is in tokens. The model can be
    run unless there are `problems`; `notes` are good to know."""

    model: str
    family: str | None = None
    blocks: int | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    context: int | None = None
    tied: bool | None = None
    weight_files: int = 0
    weight_bytes: int = 0
    dtypes: dict[str, int] = {}
    """Bytes by dtype, as the files name the dtype."""
    tokenizer: bool = False
    chat_template: bool = False
    eos_ids: list[int] | None = None
    problems: list[Problem] = []
    notes: list[str] = []

    @property
    def usable(self) -> bool:
        return not self.problems


def inspect(folder: Path) -> Report:
    """Return a report on everything that a model folder needs, with all that is wrong with it. Does
    not raise."""
    report = Report(str(folder))
    spec, tokenizer = None, None
    with _blaming(report):
        spec = read_spec(folder)
    with _blaming(report):
        _inspect_weights(CheckpointIndex.survey(folder), spec, report)
    with _blaming(report):
        tokenizer = Tokenizer.open(folder)
        report.tokenizer = tokenizer is not None
        if tokenizer is None:
            report.notes.append("no tokenizer.json: only token ids can be sent (--token-ids)")
        else:
            _inspect_text(folder, tokenizer, spec, report)
    with _blaming(report):
        report.eos_ids = sorted(eos_ids(folder, tokenizer))
        if not report.eos_ids:
            report.notes.append("no token ends an answer: each goes on to its length limit")
    with _blaming(report):
        report.notes += generation_defaults(folder).notes()
    return report


@contextmanager
def _blaming(report: Report) -> Iterator[None]:
    """Turn a ZrtError in the block into a problem of the report; a problem that several readers of
    a file come upon is listed once."""
    try:
        yield
    except ZrtError as error:
        problem = Problem(error.kind, error.message)
        if problem not in report.problems:
            report.problems.append(problem)


def require_weights(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec to plan by: the files have the last word on a tied head.

    Weights that cannot be read are refused: a ZrtError of the first problem's kind, with the list
    that `zrt check` shows.
    """
    inventory, spec = CheckpointIndex.survey(folder).matched(spec)
    problems = inventory.problems(shard_shapes(spec, 0, spec.num_blocks - 1))
    if problems:
        lines = [problem.message for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"and {len(problems) - SHOWN} more: `zrt check {folder}` lists them")
        raise ZrtError(problems[0].kind, "\n".join(lines))
    return spec


def found_spec(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec to plan by, as `require_weights` does, but `spec` itself where the files are
    broken or not there yet."""
    try:
        return CheckpointIndex.open(folder).matched(spec)[1]
    except ZrtError:
        return spec


def _inspect_weights(inventory: CheckpointIndex, spec: ModelSpec | None, report: Report) -> None:
    shapes = {}
    if spec is not None:
        report.family, report.blocks = spec.model_type, spec.num_blocks
        report.vocab_size, report.context = spec.vocab_size, spec.max_positions
        inventory, found = inventory.matched(spec)
        shapes = shard_shapes(found, 0, found.num_blocks - 1)
        report.tied, report.parameters = found.tied, sum(map(prod, shapes.values()))
        if found.tied != spec.tied:
            report.notes.append(f"the config ties the head to the embedding, but the files hold {HEAD}: that is used")
    report.problems += inventory.problems(shapes)
    files = inventory.files
    report.weight_files = len(files)
    unused = set(inventory.names())
    for name in shapes:
        entry = inventory.find(name)
        if entry is not None:
            unused.discard(inventory.stored(name))
            report.weight_bytes += entry.nbytes
            report.dtypes[entry.dtype] = report.dtypes.get(entry.dtype, 0) + entry.nbytes
    if shapes and unused:
        report.notes.append(f"{counted(len(unused), 'tensor')} of no use: {_names(sorted(unused))}")
    ignored = sorted(path.name for path in inventory.folder.glob("*.safetensors") if path not in files)
    if ignored:
        report.notes.append(f"files that are not part of the model are ignored: {_names(ignored)}")


def _inspect_text(folder: Path, tokenizer: Tokenizer, spec: ModelSpec | None, report: Report) -> None:
    report.chat_template = tokenizer.has_template
    if not report.chat_template:
        report.notes.append("no chat template: text can be sent as it is only (--raw)")
    else:
        try:
            tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        except ZrtError as error:
            report.notes.append(f"{error.message}: a plain question needs --raw")
    highest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=0)
    if spec is not None and highest >= spec.vocab_size:
        report.notes.append(
            f"the tokenizer has ids up to {highest}, the model up to {spec.vocab_size - 1}: prompts with the others are refused"
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
