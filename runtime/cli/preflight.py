"""Checks before any process starts: whether a model can be run (`zrt check`), what goes where (`zrt
plan`), and for `zrt up` both."""

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from zrt.runtime.cli.json_output import as_json
from zrt.runtime.cluster.file_schema import Conf
from zrt.runtime.cluster.gpu_memory import GpuNeeds, gpu_needs, gpu_shortage
from zrt.runtime.cluster.memory import Needs, StageNeeds, needs, shortage
from zrt.runtime.cluster.seats import stage_ranges
from zrt.runtime.endpoints import endpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size, counted, escaped
from zrt.runtime.host_memory import available_memory
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.index import Problem
from zrt.runtime.models.checkpoint.report import Report, found_spec, inspect, require_weights
from zrt.runtime.models.checkpoint.split import check_split
from zrt.runtime.models.fetch.resolve import resolve
from zrt.runtime.process import runfiles
from zrt.runtime.process.load_bars import Bars
from zrt.runtime.process.terminal import say

WIDE: Final = 1000
"""Columns of a table that goes to a file or a pipe: so many that nothing is cut."""


def prepare(conf: Conf) -> None:
    """Fetch the model, and refuse what cannot be run here, before any process starts. Memory is
    checked first: weights are large.

    ZrtError bad_model, unsupported, bad_config, insufficient_memory.
    """
    _refuse(taken_by_ours(conf.cluster.listen))
    spec = read_spec(_fetch(conf.model.ref, weights=False, text=False))
    _say_context(conf, spec)
    _refuse(shortage(_needs(conf, spec)))
    folder = fetch(conf)
    if conf.model.weights == "files":
        found = require_weights(folder, spec)
        if found != spec:
            _refuse(shortage(_needs(conf, found)))


def taken_by_ours(listen: str) -> ZrtError | None:
    """Return `bad_config` if another cluster of this machine listens at `listen`. A port that
    another program holds is reported by the process that binds it."""
    host, port = endpoint(listen)
    if not port or not _taken(host, port):
        return None
    known = runfiles.notes()
    holder = next((note for note in known if note.endpoint.endswith(f":{port}")), None)
    if holder is None:
        return None
    # Without --connect the last cluster started is meant.
    which = "" if holder == known[0] else f" --connect {holder.endpoint}"
    return ZrtError(
        "bad_config",
        f"the cluster {holder.name} already runs at {holder.endpoint} (`zrt status{which}`): `zrt down{which}` ends it, "
        "or --listen on another port (port 0 picks a free one)",
    )


def _taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def check(ref: str, *, json: bool, tp: int, trial: Callable[[int], ZrtError | None]) -> int:
    """Report on the model called `ref`, with all that keeps it from being run, and return the exit
    status. ZrtError bad_model: there is no such model.

    With `tp` over 1, report also all that keeps the model from being run by so many ranks; `trial`
    then forms such a group, and returns what went wrong.
    """
    folder = _fetch(ref)
    report = inspect(folder)
    if tp > 1:
        _check_ranks(folder, report, tp, trial)
    if json:
        _print_json({"usable": report.usable, **msgspec.to_builtins(report)})
    else:
        _print_lines(_described(report))
    for problem in report.problems:
        say(f"zrt: {problem.kind}: {escaped(problem.message)}")
    return 0 if report.usable else 1


def _check_ranks(folder: Path, report: Report, tp: int, trial: Callable[[int], ZrtError | None]) -> None:
    try:
        check_split(read_spec(folder), tp)
    except ZrtError as error:
        if error.kind == "bad_config":  # what else is wrong has been reported
            report.problems.append(Problem(error.kind, error.message))
        return
    fault = trial(tp)
    if fault is None:
        report.notes.append(f"{tp} ranks were started, joined each other, and their sum was right")
    else:
        report.problems.append(Problem(fault.kind, fault.message))


def plan(conf: Conf, *, json: bool) -> int:
    """Show which stage gets which blocks and what memory that takes, and return the exit status.
    ZrtError bad_model, unsupported, bad_config."""
    folder = _fetch(conf.model.ref, weights=False, text=False)
    spec = read_spec(folder)
    _say_context(conf, spec)
    if conf.model.weights == "files":
        spec = found_spec(folder, spec)
    found = _needs(conf, spec)
    gpus = gpu_needs(conf, found, _gpu_memory)
    errors = [error for error in (shortage(found), gpu_shortage(gpus)) if error is not None]
    if json:
        faults = [{"kind": error.kind, "message": error.message} for error in errors]
        fields = {"gpus": msgspec.to_builtins(gpus), "fits": not errors, "error": faults[0] if faults else None}
        _print_json(_plan_fields(conf, spec, found) | fields)
    else:
        _print_plan(conf, spec, found, gpus)
    for error in errors:
        say(f"zrt: {error}")
    return 1 if errors else 0


def _gpu_memory(device: str) -> tuple[int, int]:
    from zrt.runtime.compute.devices import device_memory  # torch: only where a file names a GPU

    return device_memory(device)


def fetch(conf: Conf) -> Path:
    """Return the folder of the cluster's model, fetched if need be. What it lacks is said where the
    hub cannot be asked. ZrtError bad_model."""
    return _fetch(conf.model.ref, weights=conf.model.weights == "files")


def _fetch(ref: str, *, weights: bool = True, text: bool = True) -> Path:
    with Bars() as bars:
        return resolve(ref, weights=weights, text=text, progress=bars.update, say=bars.warn)


def _say_context(conf: Conf, spec: ModelSpec) -> None:
    if conf.model.context > spec.max_positions:
        text = "no session is longer, although [model] context is"
        say(f"zrt: the model's context is {spec.max_positions} tokens: {text} {conf.model.context}")


def _needs(conf: Conf, spec: ModelSpec) -> Needs:
    return needs(conf, spec, stage_ranges(conf, spec), available_memory())


def _refuse(error: ZrtError | None) -> None:
    if error is not None:
        raise error


def _described(report: Report) -> list[str]:
    """Return a report in lines, without its problems, which go to stderr."""
    lines = [report.model]
    if report.family is not None:
        lines[0] += f": {report.family}, {counted(report.blocks or 0, 'block')}, {report.parameters:,} parameters"
        lines.append(f"  context    {report.context} tokens; vocabulary {report.vocab_size}; {_tied(report)}")
    files = counted(report.weight_files, "file")
    dtypes = ", ".join(f"{dtype} {byte_size(size)}" for dtype, size in sorted(report.dtypes.items()))
    if dtypes or report.family is not None:
        lines.append(f"  weights    {dtypes or 'nothing that is used'} in {files}")
    else:
        lines.append(f"  weights    {files}")
    template = "with a chat template" if report.chat_template else "without a chat template"
    ends = "unknown" if report.eos_ids is None else report.eos_ids or "none"
    lines.append(f"  tokenizer  {template if report.tokenizer else 'none'}; end ids {ends}")
    lines += [f"  note: {note}" for note in report.notes]
    lines.append("can be run" if report.usable else f"cannot be run: {counted(len(report.problems), 'problem')}")
    return lines


def _tied(report: Report) -> str:
    return "head tied to the embedding" if report.tied else "head of its own"


def _plan_fields(conf: Conf, spec: ModelSpec, found: Needs) -> dict[str, Any]:
    return {
        "model": conf.model.ref,
        "family": spec.model_type,
        "blocks": spec.num_blocks,
        "dtype": conf.model.dtype,
        **msgspec.to_builtins(found),
        "stages": [_stage_fields(stage) for stage in found.stages],
    }


def _stage_fields(stage: StageNeeds) -> dict[str, Any]:
    return {**msgspec.to_builtins(stage), "blocks": str(stage.blocks), "total_bytes": stage.total_bytes}


def _print_plan(conf: Conf, spec: ModelSpec, found: Needs, gpus: tuple[GpuNeeds, ...]) -> None:
    lines = [
        f"{conf.model.ref}: {spec.model_type}, {counted(spec.num_blocks, 'block')}, {conf.model.dtype}, context {found.context}",
    ]
    _print_lines(lines)
    table = Table("stage", "blocks", "replicas", "device")
    for column in ("weights", "KV", "KV tokens", "process", "each", "may take"):
        table.add_column(column, justify="right")
    for stage in found.stages:
        sizes = (stage.weight_bytes, stage.kv_bytes, stage.process_bytes, stage.total_bytes)
        weights, kv, process, total = map(byte_size, sizes)
        memory = "" if stage.memory is None else byte_size(stage.memory)
        table.add_row(
            stage.name,
            stage.own if stage.lent else str(stage.blocks),
            str(stage.replicas),
            stage.device if stage.tp == 1 else f"{stage.device}, {stage.tp} ranks",
            weights,
            kv,
            str(stage.kv_tokens),
            process,
            total,
            memory,
        )
        for lent in stage.lent:
            sizes = (lent.weight_bytes, lent.kv_bytes, lent.process_bytes, lent.total_bytes)
            weights, kv, process, total = map(byte_size, sizes)
            where = "its own" if lent.joins else lent.device
            table.add_row(f"  lent to {lent.worker}", lent.blocks, "", where, weights, kv, "", process, total, "")
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)
    _print_lines(_sums(found, gpus))
    if 0 < found.kv_tokens < found.context:
        _print_lines(
            [f"note: KV memory holds {found.kv_tokens} tokens, less than the context: longer sessions are refused"]
        )


def _sums(found: Needs, gpus: tuple[GpuNeeds, ...]) -> list[str]:
    """Return lines about the machine's memory, then each GPU's, then the memory of each stage that
    layer workers may take over."""
    others = {"the coordinator": 1, "spares": found.spares_bytes, "layer workers": found.workers_bytes}
    names = " and ".join(name for name, size in others.items() if size)
    outside = "; weights and KV on GPUs are not in it" if gpus else ""
    lines = [
        f"in all {byte_size(found.needed_bytes)} with {names}; {byte_size(found.available_bytes)} of this machine's memory are "
        f"available{outside}"
    ]
    for gpu in gpus:
        has = gpu.fault or f"{byte_size(gpu.free_bytes)} of its {byte_size(gpu.total_bytes)} are free"
        lines.append(f"{gpu.device}: {byte_size(gpu.needed_bytes)} of weights and KV; {has}")
    for stage in found.stages:
        if stage.lendable_bytes:
            left = byte_size(stage.total_bytes - stage.lendable_bytes)
            over = stage.total_bytes - stage.memory if stage.memory is not None else 0
            if over > stage.lendable_bytes:
                without = "it may take too little even for the rest"
            elif over > 0:
                without = f"it is ready once workers with room for {byte_size(over)} have joined"
            else:
                without = "it is ready without any, too"
            lines.append(
                f"{stage.name}: of its {byte_size(stage.total_bytes)} only {left} count in all; blocks {stage.own or 'none'} and their KV, "
                f"{byte_size(stage.lendable_bytes)}, are shared with layer workers when they join, by their memory and speed; {without}"
            )
    return lines


def _print_lines(lines: list[str]) -> None:
    print("\n".join(map(escaped, lines)), flush=True)


def _print_json(fields: dict[str, Any]) -> None:
    print(as_json(**fields), flush=True)
