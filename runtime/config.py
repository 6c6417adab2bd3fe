"""Reads cluster files. Every mistake is named, with the valid values, before anything starts."""

import ipaddress
import re
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from zrt.runtime.cluster_file import Cluster, Conf, Kv, Lend, Limits, Log, Metrics, Model, Spares, Stage, Worker
from zrt.runtime.errors import ZrtError
from zrt.runtime.plan import Blocks
from zrt.runtime.toml_tables import read_table, read_tables, size, unknown


def load(path: Path | None = None) -> Conf:
    """Read a cluster file, by default the packaged conf/local.toml. Errors: bad_config, a line for each mistake."""
    where = "conf/local.toml" if path is None else str(path)
    try:
        source = resources.files("zrt.conf").joinpath("local.toml") if path is None else path
        return parse(source.read_text(encoding="utf-8"), where)
    except FileNotFoundError:
        raise ZrtError("bad_config", "there is no such cluster file", where) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ZrtError("bad_config", f"the cluster file cannot be read: {error}", where) from error


def parse(text: str, where: str) -> Conf:
    """The cluster file with this text. `where` is what errors call it. Errors: bad_config, a line for each mistake."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ZrtError("bad_config", f"this is no TOML: {error}", where) from error
    mistakes = unknown(tables, [*_TABLES, "stage", "worker"], "table")
    read = {
        name: read_table(kind, tables.get(name, {}), f"[{name}]", _READERS, mistakes, _JUDGED)
        for name, kind in _TABLES.items()
        if name in tables or name == "model"
    }
    stages = tables.get("stage")
    if not isinstance(stages, list) or not stages:
        mistakes.append("there is no [[stage]], and at least one is needed")
        stages = []
    read_stages = [
        read_table(Stage, table, f"[[stage]] {n}", _READERS, mistakes, _JUDGED) for n, table in enumerate(stages, 1)
    ]
    workers = read_tables(Worker, tables.get("worker", []), "[[worker]]", _READERS, mistakes)
    cluster, metrics = read.get("cluster", Cluster()), read.get("metrics", Metrics())
    mistakes += _contradictions(cluster, metrics, read_stages, workers)  # type: ignore[arg-type]
    if mistakes:
        raise ZrtError("bad_config", "\n".join(mistakes), where)
    return Conf(stages=tuple(read_stages), workers=workers or (), **read)  # type: ignore[arg-type]


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
    """The conf with what the command line says instead. `tp` is that of every stage; `stages` replaces the stage list by so many planned ones,
    with the settings that the stages of the file have in common. Errors: bad_config, where they have not, or `listen` is no endpoint or is
    open to others without `insecure`, here or in the file, or `advertise` is nothing that could be reached."""
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
        if tp > 1 and any(stage.lend for stage in conf.stages):
            raise ZrtError("bad_config", f"--tp {tp}: a stage that lends has one rank; edit the cluster file")
        conf = msgspec.structs.replace(conf, stages=tuple(msgspec.structs.replace(one, tp=tp) for one in conf.stages))
    return conf


def _reached(cluster: Cluster, listen: str | None, advertise: str | None, insecure: bool) -> Cluster:
    """With what the command line says of where it is reached. ZrtError bad_config."""
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
    if mistake := _port_unknown(cluster):
        raise ZrtError("bad_config", f"--advertise: {mistake}")
    return cluster


def _port_unknown(cluster: Cluster) -> str:
    """What is wrong if it advertises a port but listens on any: nobody could lead the one to the other."""
    if cluster.advertise is None or not advertised(cluster.advertise)[1] or endpoint(cluster.listen)[1]:
        return ""
    return f"{cluster.advertise} names a port, but {cluster.listen} leaves its own to the system: leave out the one, or name the other"


def threads(conf: Conf, stage: Stage | Spares, cores: int) -> tuple[int, int]:
    """The compute threads of each replica of `stage` on a machine of `cores` cores that runs them all: every core while one stage computes
    at a time, its share while all do. A spare counts as the replica whose place it takes."""
    replicas = sum(each.replicas for each in conf.stages)
    return stage.threads or cores, stage.threads or max(1, cores // replicas)


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of "tcp://HOST:PORT"; an IPv6 host stands in brackets, which are taken off. Raises ValueError."""
    match = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f'{text!r} is no endpoint; write tcp://HOST:PORT, such as "tcp://127.0.0.1:7411"')
    return match[1] or match[2], int(match[3])


def advertised(text: str) -> tuple[str, int]:
    """Host and port (0: not given) of "tcp://HOST" or "tcp://HOST:PORT", for others to connect to. Raises ValueError."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "cluster": Cluster,
    "model": Model,
    "spares": Spares,
    "kv": Kv,
    "limits": Limits,
    "metrics": Metrics,
    "log": Log,
}


def _blocks(value: object) -> Blocks:
    return Blocks.parse(msgspec.convert(value, str))


def _lend(value: object) -> tuple[Lend, ...]:
    mistakes: list[str] = []
    lends = read_tables(Lend, value, "[[stage.lend]]", {"blocks": _blocks}, mistakes)
    if lends is None or mistakes:
        raise ValueError("; ".join(mistakes))
    return lends


def _device(value: object) -> str:
    text = msgspec.convert(value, str)
    if not re.fullmatch(r"cpu|cuda:\d+", text, re.ASCII):
        raise ValueError(f"{text!r} is no device; valid: cpu, cuda:0, cuda:1 and so on")
    return text


def _listen(value: object) -> str:
    text = msgspec.convert(value, str)
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


_JUDGED: Final = frozenset({"listen", "insecure", "advertise", "blocks", "replicas", "tp", "memory", "lend", "backend"})
"""Keys by which tables are judged beside others."""


def _contradictions(
    cluster: Cluster | None, metrics: Metrics | None, stages: list[Stage | None], workers: tuple[Worker, ...] | None
) -> list[str]:
    """Mistakes that no value has by itself. What is None could not be read, and is not judged."""
    mistakes = []
    for name, table in (("cluster", cluster), ("metrics", metrics)):
        if cluster is None or table is None or cluster.insecure or not table.listen:
            continue
        if not is_loopback(endpoint(table.listen)[0]):
            mistakes.append(
                f"[{name}] listen: {table.listen} can be reached from other machines and nothing is encrypted; "
                "listen on 127.0.0.1, or set insecure = true in [cluster]"
            )
    if cluster is not None and (text := _port_unknown(cluster)):
        mistakes.append(f"[cluster] advertise: {text}")
    read = {number: stage for number, stage in enumerate(stages, 1) if stage is not None}
    before: tuple[int, Blocks] | None = None
    for number, stage in read.items():
        if stage.blocks is None:
            continue
        if before is not None and stage.blocks.first <= before[1].last:
            wrong = "overlap" if stage.blocks.last >= before[1].first else "come before"
            mistakes.append(f"[[stage]] {number} blocks: {stage.blocks} {wrong} {before[1]} of [[stage]] {before[0]}")
        before = (number, stage.blocks)
    if workers is not None and len(read) == len(stages):
        mistakes += _lending(read, workers)
    planned = {number: stage.memory for number, stage in read.items() if stage.blocks is None}
    without = [number for number, memory in planned.items() if memory is None]
    if without and len(without) < len(planned):
        mistakes.append(
            f"[[stage]] {without[0]} has no memory, but others do: blocks are planned by it, so say it for every stage "
            "whose blocks are planned, or for none"
        )
    return mistakes


def _lending(stages: dict[int, Stage], workers: tuple[Worker, ...]) -> list[str]:
    """What is wrong with what stages lend."""
    mistakes = []
    names = [worker.name for worker in workers]
    mistakes += [f"[[worker]] {name}: two have this name" for name in sorted(set(names)) if names.count(name) > 1]
    taken: dict[str, int] = {}
    for number, stage in stages.items():
        at = f"[[stage]] {number} lend"
        if stage.lend and stage.tp > 1:
            mistakes.append(f"{at}: a stage with tp {stage.tp} lends nothing")
        if stage.lend and stage.replicas > 1:
            mistakes.append(f"{at}: a worker serves one block server, so a stage that lends has one replica")
        before: Lend | None = None
        for lend in sorted(stage.lend, key=lambda lend: lend.blocks.first):
            if lend.worker not in names:
                known = ", ".join(names) or "none"
                mistakes.append(f"{at}: there is no [[worker]] {lend.worker}; there are: {known}")
            if taken.setdefault(lend.worker, number) != number:
                mistakes.append(f"{at}: {lend.worker} serves [[stage]] {taken[lend.worker]} already")
            if before is not None and lend.blocks.first <= before.blocks.last:
                mistakes.append(f"{at}: {lend.blocks} of {lend.worker} and {before.blocks} of {before.worker} overlap")
            before = lend
        if stage.backend == "layers" and stage.tp > 1:
            mistakes.append(f"[[stage]] {number} backend: a stage with tp {stage.tp} lends nothing")
    if not any(stage.backend == "layers" for stage in stages.values()):
        text = 'no [[stage.lend]] names it, and no [[stage]] has backend = "layers"'
        mistakes += [f"[[worker]] {name}: {text}" for name in names if name not in taken]
    return mistakes
