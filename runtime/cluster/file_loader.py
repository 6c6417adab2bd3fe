"""Reader of cluster files. Every mistake is named, with the valid values, before anything
starts."""

import base64
import os
import tomllib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from zrt.runtime.cluster.file_checks import contradictions
from zrt.runtime.cluster.file_schema import (
    ClusterSettings,
    Conf,
    Kv,
    LendSettings,
    Limits,
    Log,
    Metrics,
    Model,
    Spares,
    Stage,
    Worker,
    device,
)
from zrt.runtime.cluster.partition import Blocks
from zrt.runtime.cluster.toml_tables import Read, read_as, read_table, read_tables, size, unknown
from zrt.runtime.endpoints import advertised, endpoint, is_loopback, port_unknown
from zrt.runtime.errors import ZrtError

Values = Mapping[str, Mapping[str, object] | Sequence[Mapping[str, object]]]
"""Values by table and key. A list stands for a list of tables."""


MOST_BYTES: Final = 90 << 10
"""The largest cluster file: it goes to a child in its environment, where Linux has 128 KiB for a
variable, and base64 takes a third more."""

_HANDED: Final = "ZRT_CLUSTER_TEXT"


def load(path: Path | None = None, given: Values = MappingProxyType({}), text: str | None = None) -> Conf:
    """Return the cluster file at `path`, by default the packaged conf/local.toml. `text` is what
    was read of it before, None to read it. Errors: bad_config, a line for each mistake."""
    where = "conf/local.toml" if path is None else str(path)
    if text is None:
        text = _read(path, where)
    return msgspec.structs.replace(parse(text, where, given), text=text)


def _read(path: Path | None, where: str) -> str:
    source = resources.files("zrt.conf").joinpath("local.toml") if path is None else path
    try:
        with source.open(encoding="utf-8-sig") as file:  # some editors begin a file with a BOM
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ZrtError("bad_config", "there is no such cluster file", where) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ZrtError("bad_config", f"the cluster file cannot be read: {error}", where) from error
    if len(text.encode()) > MOST_BYTES:
        raise ZrtError("bad_config", f"a cluster file has at most {MOST_BYTES >> 10} KiB, and this is larger", where)
    return text


def hand_over(conf: Conf) -> dict[str, str]:
    """Return the environment variables by which a child has the cluster file as it was read:
    whatever becomes of the file, all processes of a cluster go by the same."""
    return {_HANDED: base64.b64encode(conf.text.encode()).decode()}


def handed_over(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the text of the cluster file that a parent has read, and remove it from the
    environment; None: it is to be read."""
    told = environ.pop(_HANDED, None)
    return None if told is None else base64.b64decode(told).decode()


def parse(text: str, where: str, given: Values = MappingProxyType({})) -> Conf:
    """Return the cluster file with this text. `where` is what errors call it; the values in `given`
    stand in place of the file's, which may lack them; a list, only where the file has none. Errors:
    bad_config, a line for each mistake."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ZrtError("bad_config", f"this is not TOML: {error}", where) from error
    for name, values in given.items():
        if not isinstance(values, Mapping):
            tables.setdefault(name, values)
        elif isinstance(table := tables.get(name, {}), dict):
            tables[name] = {**table, **values}
    mistakes = unknown(tables, [*_TABLES, "stage", "worker"], "table")
    read: dict[str, Any] = {
        name: read_table(kind, tables.get(name, {}), f"[{name}]", _READERS, mistakes)
        for name, kind in _TABLES.items()
        if name in tables or name == "model"
    }
    stages = tables.get("stage")
    if not isinstance(stages, list) or not stages:
        mistakes.append("there is no [[stage]], and at least one is needed")
        stages = []
    read_stages = read_tables(Stage, stages, "[[stage]]", _READERS, mistakes) or []
    workers = read_tables(Worker, tables.get("worker", []), "[[worker]]", _READERS, mistakes)
    cluster, metrics = read.get("cluster", Read(ClusterSettings())), read.get("metrics", Read(Metrics()))
    mistakes += contradictions(cluster, metrics, read_stages, workers)
    if mistakes:
        raise ZrtError("bad_config", "\n".join(mistakes), where)
    return Conf(
        stages=tuple(stage.table for stage in read_stages if stage is not None),
        workers=tuple(worker.table for worker in workers or () if worker is not None),
        where=where,
        **{name: table.table for name, table in read.items()},
    )


def override(
    conf: Conf,
    *,
    model: str | None = None,
    stages: int | None = None,
    tp: int | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    insecure: bool = False,
) -> Conf:
    """Return the conf with the command line's values in place of the file's. `tp` is that of every
    stage; `stages` replaces the stage list by so many planned stages, with the settings that the
    stages of the file have in common.

    Errors: bad_config, if the file's stages differ in their settings, if `listen` is no endpoint or
    is open to others without `insecure`, here or in the file, or if `advertise` is no address that
    could be reached.
    """
    conf = msgspec.structs.replace(conf, cluster=_reached(conf.cluster, listen, advertise, insecure))
    if model is not None:
        if not model:
            raise ZrtError("bad_config", "--model is empty; name a demo model, a folder or a hub id")
        conf = msgspec.structs.replace(conf, model=msgspec.structs.replace(conf.model, ref=model))
    if stages is not None:
        if stages < 1:
            raise ZrtError("bad_config", f"--stages {stages}: at least one stage is needed")
        if any(stage.lend for stage in conf.stages):
            raise ZrtError("bad_config", f"--stages {stages} cannot replace stages that lend; edit the cluster file")
        planned = [msgspec.structs.replace(stage, blocks=None) for stage in conf.stages]
        if any(stage != planned[0] for stage in planned):
            raise ZrtError(
                "bad_config",
                f"--stages {stages} cannot replace stages that differ in replicas, device, threads, memory or tp; edit the cluster file",
            )
        conf = msgspec.structs.replace(conf, stages=(planned[0],) * stages)
    if tp is not None:
        if tp < 1:
            raise ZrtError("bad_config", f"--tp {tp}: at least one rank is needed")
        if tp > 1 and any(stage.lend or stage.backend == "layers" for stage in conf.stages):
            raise ZrtError("bad_config", f"--tp {tp}: a stage that lends has one rank; edit the cluster file")
        conf = msgspec.structs.replace(conf, stages=tuple(msgspec.structs.replace(one, tp=tp) for one in conf.stages))
    return conf


def _reached(cluster: ClusterSettings, listen: str | None, advertise: str | None, insecure: bool) -> ClusterSettings:
    """Return the table with the command line's values of where the cluster is reached. ZrtError
    bad_config: a value is wrong."""
    for option, text, reader in (("--listen", listen, endpoint), ("--advertise", advertise, advertised)):
        try:
            if text is not None:
                reader(text)
        except ValueError as error:
            raise ZrtError("bad_config", f"{option}: {error}") from None
    if listen is not None and not (is_loopback(endpoint(listen)[0]) or insecure or cluster.insecure):
        open_ = "can be reached from other machines and nothing is encrypted: say --insecure if that is meant"
        raise ZrtError("bad_config", f"--listen: {listen} {open_}")
    given = {"listen": listen, "advertise": advertise, "insecure": insecure or None}
    cluster = msgspec.structs.replace(cluster, **{key: value for key, value in given.items() if value is not None})
    if mistake := port_unknown(cluster.advertise, cluster.listen):
        raise ZrtError("bad_config", f"--advertise: {mistake}")
    return cluster


def threads(conf: Conf, stage: Stage | Spares, cores: int) -> tuple[int, int]:
    """Return the compute threads of each replica of `stage` on a machine of `cores` cores that runs
    them all: every core while one stage computes at a time, its share while all do. A spare counts
    as the replica whose place it takes."""
    replicas = sum(each.replicas for each in conf.stages)
    return stage.threads or cores, stage.threads or max(1, cores // replicas)


_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "cluster": ClusterSettings,
    "model": Model,
    "spares": Spares,
    "kv": Kv,
    "limits": Limits,
    "metrics": Metrics,
    "log": Log,
}


def _blocks(value: object) -> Blocks:
    return Blocks.parse(read_as(str, value, 'a text such as "0-14"'))


def _lend(value: object) -> tuple[LendSettings, ...]:
    mistakes: list[str] = []
    lends = read_tables(LendSettings, value, "[[stage.lend]]", {"blocks": _blocks}, mistakes)
    if lends is None or mistakes:
        raise ValueError("; ".join(mistakes))
    return tuple(lend.table for lend in lends if lend is not None)


def _device(value: object) -> str:
    return device(read_as(str, value, "a text such as cuda:0"))


def _listen(value: object) -> str:
    text = read_as(str, value, "a text such as tcp://127.0.0.1:7411")
    endpoint(text)
    return text


def _advertise(value: object) -> str:
    text = msgspec.convert(value, str)
    advertised(text)
    return text


_READERS: Final[dict[str, Callable[[object], Any]]] = {
    "blocks": _blocks,
    "device": _device,
    "listen": _listen,
    "advertise": _advertise,
    "bytes": size,
    "memory": size,
    "lend": _lend,
}
