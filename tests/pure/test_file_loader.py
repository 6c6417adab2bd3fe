"""Cluster files: what they may say, and that every mistake is named with what would be right."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from zrt.actors.options import ClusterOptions
from zrt.runtime.cluster import file_loader, file_schema
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
)
from zrt.runtime.cluster.partition import Blocks
from zrt.runtime.errors import ZrtError

SMALL = '[model]\nref = "m"\n[[stage]]\n'


def refusal(text: str) -> str:
    with pytest.raises(ZrtError) as raised:
        file_loader.parse(text, "my.toml")
    assert (raised.value.kind, raised.value.where) == ("bad_config", "my.toml")
    return raised.value.message


def test_the_packaged_file_is_two_stages_of_the_demo_model() -> None:
    conf = file_loader.load()
    assert conf.model == Model("smollm2-135m", "float32", 4096, "files")
    assert conf.stages == (Stage(), Stage())
    assert conf.cluster == ClusterSettings("local", "tcp://127.0.0.1:7411", insecure=False)
    assert (conf.kv, conf.limits) == (Kv(1 << 30), Limits())


def test_the_file_of_the_docs_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster-file.md").read_text(encoding="utf-8")
    conf = file_loader.parse(page.partition("```toml\n")[2].partition("```")[0], "cluster-file.md")
    assert [stage.replicas for stage in conf.stages] == [1, 2]
    assert conf.spares.count == 1


def test_a_short_file_gets_the_defaults() -> None:
    assert file_loader.parse(SMALL, "") == Conf(model=Model("m"), stages=(Stage(),))


@pytest.mark.parametrize(
    ("stages", "limits", "chunk"),
    [
        (["cpu"], "", file_schema.CHUNK),
        (["cuda:0", "cuda:1"], "", file_schema.CHUNK_ON_GPU),
        (["cuda:0", "cpu"], "", file_schema.CHUNK),
        (["cuda:0"], "[limits]\nchunk = 64", 64),
    ],
)
def test_prompts_are_cut_as_suits_the_devices(stages: list[str], limits: str, chunk: int) -> None:
    tables = "".join(f"[[stage]]\ndevice = '{device}'\n" for device in stages)
    assert file_loader.parse(f"[model]\nref = 'm'\n{limits}\n{tables}", "").chunk == chunk


def test_a_pinned_stage_may_say_its_memory_alone() -> None:
    conf = file_loader.parse(SMALL + 'blocks = "0-3"\nmemory = "2GiB"\n[[stage]]', "")
    assert [stage.memory for stage in conf.stages] == [2 << 30, None]


def test_a_full_file() -> None:
    conf = file_loader.parse(
        """
        [cluster]
        name = "lab-2"
        listen = "tcp://0.0.0.0:0"
        insecure = true
        advertise = "tcp://box"
        [model]
        ref = "owner/name"
        dtype = "bfloat16"
        context = 8192
        weights = "random"
        [[stage]]
        blocks = "0-14"
        replicas = 2
        device = "cuda:1"
        threads = 3
        memory = "8GiB"
        [[stage]]
        [spares]
        count = 2
        device = "cuda:0"
        threads = 1
        memory = "4GiB"
        [kv]
        bytes = "1.5GiB"
        [limits]
        chunk = 256
        sessions = 8
        queue = 0
        idle_s = 60
        lease_s = 2.5
        restarts = 0
        [metrics]
        listen = "tcp://127.0.0.1:9464"
        [log]
        level = "info"
        format = "json"
        """,
        "",
    )
    assert conf == Conf(
        cluster=ClusterSettings("lab-2", "tcp://0.0.0.0:0", insecure=True, advertise="tcp://box"),
        model=Model("owner/name", "bfloat16", 8192, "random"),
        stages=(Stage(Blocks(0, 14), 2, "cuda:1", 3, 8 << 30), Stage()),
        spares=Spares(2, "cuda:0", 1, 4 << 30),
        kv=Kv(3 << 29),
        limits=Limits(256, 8, 0, 60.0, 2.5, 0),
        metrics=Metrics("tcp://127.0.0.1:9464"),
        log=Log("info", "json"),
    )


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("1000", 1000),
        ('"1000B"', 1000),
        ('"2KiB"', 2048),
        ('"512MiB"', 1 << 29),
        ('"1 GiB"', 1 << 30),
        ('"2TiB"', 1 << 41),
    ],
)
def test_sizes(size: str, count: int) -> None:
    assert file_loader.parse(f"{SMALL}[kv]\nbytes = {size}", "").kv.bytes == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            SMALL + "[modle]\nref = 'x'",
            ["modle", "did you mean model?", "cluster, model, spares, kv, limits, metrics, log, stage"],
        ),
        (SMALL + "[spares]\ncount = -1", ["[spares] count", ">= 0"]),
        (SMALL + "[spares]\nmemory = '1GB'", ["[spares] memory", "'1GB'", "GiB"]),
        (SMALL + "[spares]\nblocks = '0-3'", ["blocks", "[spares]", "count, device, threads, memory"]),
        (
            SMALL + "lent = 2",
            [
                "[[stage]] 1",
                "lent is not a key",
                "blocks, replicas, device, threads, memory, tp, lend, backend, gpu_memory",
            ],
        ),
        (SMALL + "lend = 2", ["[[stage]] 1 lend", "must be a list of tables, not 2"]),
        (SMALL + "tp = 0", ["[[stage]] 1 tp", ">= 1"]),
        (SMALL + "gpu_memory = 1.5", ["[[stage]] 1 gpu_memory: expected a number > 0 and <= 1, got 1.5"]),
        (SMALL + "gpu_memory = 0", ["[[stage]] 1 gpu_memory", "> 0"]),
        (SMALL + "theads = 2", ["theads", "did you mean threads?"]),
        (SMALL + "[cluster]\nlistne = 'x'", ["[cluster]", "did you mean listen?", "name, listen, insecure, advertise"]),
        (SMALL + "[limits]\nzzz = 1", ["[limits]", "chunk, sessions, queue, idle_s, lease_s, restarts"]),
        ("[[stage]]", ["[model] lacks ref"]),
        ("[model]\nref = 'm'", ["no [[stage]]"]),
        ("[model]\nref = 'm'\n[stage]", ["[[stage]]"]),
        ("stage = [3]\n[model]\nref = 'm'", ["[[stage]] 1", "table", "3"]),
        ("model = 'm'\n[[stage]]", ["[model]", "table", "'m'"]),
        ("[model]\nref = ''\n[[stage]]", ["[model] ref: expected a text that is not empty, got ''"]),
        ("[model]\nref = 'm'\ndtype = 'float8'\n[[stage]]", ["'float8'", "float32, bfloat16, float16"]),
        ("[model]\nref = 'm'\nweights = 'none'\n[[stage]]", ["'none'", "files, random"]),
        ("[model]\nref = 'm'\ncontext = 0\n[[stage]]", ["[model] context", ">= 1"]),
        ("[model]\nref = 'm'\ncontext = '4k'\n[[stage]]", ["[model] context: expected a whole number >= 1, got '4k'"]),
        (SMALL + "replicas = 0", ["[[stage]] 1 replicas", ">= 1"]),
        (SMALL + "replicas = true", ["[[stage]] 1 replicas: expected a whole number >= 1, got true"]),
        (SMALL + 'memory = "much"', ["[[stage]] 1 memory", "'much' is no size"]),
        (SMALL + "memory = 0", ["[[stage]] 1 memory", "no size above 0"]),
        (SMALL + '[[stage]]\nmemory = "1GiB"', ["[[stage]] 1 has no memory", "every stage whose blocks are planned"]),
        (SMALL + "threads = 0", ["[[stage]] 1 threads", ">= 1"]),
        (SMALL + "device = 'gpu'", ["[[stage]] 1 device", "'gpu'", "cpu, cuda:0"]),
        (SMALL + "device = 'cuda'", ["[[stage]] 1 device", "'cuda'"]),
        (SMALL + "blocks = '0-'", ["[[stage]] 1 blocks", "'0-'", "FIRST-LAST"]),
        (SMALL + "blocks = '4-2'", ["[[stage]] 1 blocks", "4-2", "end before they begin"]),
        (SMALL + "blocks = 4", ['[[stage]] 1 blocks: expected a text such as "0-14", got 4']),
        (SMALL + "blocks = '0-4'\n[[stage]]\nblocks = '4-9'", ["[[stage]] 2", "4-9", "overlap", "0-4", "[[stage]] 1"]),
        (SMALL + "blocks = '5-9'\n[[stage]]\n[[stage]]\nblocks = '0-4'", ["[[stage]] 3", "come before", "5-9"]),
        (SMALL + "[kv]\nbytes = '1GB'", ["[kv] bytes", "'1GB'", "GiB"]),
        (SMALL + "[kv]\nbytes = 0", ["[kv] bytes", "0"]),
        (SMALL + "[kv]\nbytes = -5", ["[kv] bytes", "-5"]),
        (SMALL + "[kv]\nbytes = true", ['[kv] bytes: expected bytes or a text such as "1GiB", got true']),
        (SMALL + "[limits]\nidle_s = 0", ["[limits] idle_s: expected a number > 0, got 0"]),
        (SMALL + "[limits]\nsessions = 0", ["[limits] sessions: expected a whole number >= 1, got 0"]),
        (SMALL + "[limits]\nchunk = 'many'", ["[limits] chunk: expected a whole number >= 1, got 'many'"]),
        (SMALL + "[cluster]\ninsecure = 1", ["[cluster] insecure: expected true or false, got 1"]),
        (SMALL + "[limits]\nrestarts = -1", ["[limits] restarts", ">= 0"]),
        (SMALL + "[cluster]\nname = 'a b'", ["[cluster] name", "a-z"]),
        (SMALL + "[cluster]\nlisten = '127.0.0.1:7411'", ["[cluster] listen", "tcp://HOST:PORT"]),
        (SMALL + "[cluster]\nlisten = 'tcp://127.0.0.1:70000'", ["[cluster] listen", "70000"]),
        (SMALL + "[cluster]\nlisten = 'tcp://127.0.0.1'", ["[cluster] listen", "tcp://HOST:PORT"]),
        (SMALL + "[cluster]\nlisten = 'tcp://0.0.0.0:1'", ["0.0.0.0:1", "insecure = true"]),
        (SMALL + "[cluster]\nlisten = 'tcp://*:1'", ["insecure = true"]),
        (SMALL + "[metrics]\nlisten = 'tcp://0.0.0.0:1'", ["[metrics] listen", "insecure = true"]),
        (SMALL + "[metrics]\nlisten = '9464'", ["[metrics] listen", "tcp://HOST:PORT"]),
        (SMALL + "[log]\nlevel = 'loud'", ["[log] level", "debug, info, warning, error"]),
        (SMALL + "[log]\nformat = 'xml'", ["[log] format", "text, json"]),
        (SMALL + "[cluster]\nlisten = 'tcp://[::]:1'", ["insecure = true"]),
        (SMALL + "[cluster]\nadvertise = 'box'", ["[cluster] advertise", "tcp://HOST or tcp://HOST:PORT"]),
        (SMALL + "[cluster]\nadvertise = 'tcp://0.0.0.0'", ["[cluster] advertise", "names no host"]),
        (
            SMALL + "[cluster]\nlisten = 'tcp://127.0.0.1:0'\nadvertise = 'tcp://box:1'",
            ["[cluster] advertise", "a port"],
        ),
        ("[model]\nref = m", ["TOML", "line 2"]),
        ("", ["[model] lacks ref", "no [[stage]]"]),
    ],
)
def test_a_mistake_is_named_with_what_is_valid(text: str, says: list[str]) -> None:
    message = refusal(text)
    assert [part for part in says if part not in message] == []


def test_every_mistake_is_named_at_once() -> None:
    message = refusal("[model]\nref = 'm'\ndtype = 'x'\ncontext = 0\n[[stage]]\nthread = 1\n[kv]\nbytes = 'much'\n")
    assert len(message.splitlines()) == 4


def test_the_file_is_said_before_its_mistakes() -> None:
    with pytest.raises(ZrtError) as several:
        file_loader.parse("[model]\nref = 'm'\ncontext = 0\n[[stage]]\nthread = 1\n", "my.toml")
    first, *mistakes = str(several.value).splitlines()
    assert (first, len(mistakes), str(several.value).count("my.toml")) == ("bad_config: my.toml:", 2, 1)
    with pytest.raises(ZrtError) as one:
        file_loader.parse("[model]\nref = 'm'\n", "my.toml")
    assert str(one.value) == "bad_config: there is no [[stage]], and at least one is needed (my.toml)"


def test_contradictions_are_named_beside_what_is_wrong_by_itself() -> None:
    message = refusal(
        "[cluster]\nname = 'a b'\nlisten = 'tcp://0.0.0.0:1'\n[model]\nref = 'm'\ncontext = 0\n[[stage]]\nblocks = '0-3'\n"
        "thread = 1\n[[stage]]\nblocks = '2-5'\n[[worker]]\nname = 'attic'\n[kv]\nbytes = 'much'\n"
    )
    for place in (
        "[cluster] name",
        "[cluster] listen",
        "[model] context",
        "[kv] bytes",
        "[[stage]] 1 thread",
        "[[stage]] 2 blocks: 2-5 overlap",
        "[[worker]] attic: no [[stage.lend]] names it",
    ):
        assert place in message


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        (  # neither the blocks of the first nor the memory of the second
            "blocks = 4\n[[stage]]\nblocks = '0-3'\nmemory = '1GB'\n[[stage]]\nblocks = '2-5'\n",
            ["1 blocks: expected", "2 memory: '1GB'", "3 blocks: 2-5 overlap 0-3 of [[stage]] 2"],
        ),
        ("block = '0-3'\n[[stage]]\nblocks = '4-9'\n", ["1 block is not a key here; did you mean blocks?"]),
        (
            "thread = 1\nblocks = '0-14'\n[[stage]]\nblocks = '16-29'\n",
            ["1 thread is not a key", "2 blocks: blocks 15-15 before 16-29 belong to no stage"],
        ),
        (
            "blocks = '0-14'\n[[stage.lend]]\nworker = 'atic'\nblocks = '10-40'\n[[worker]]\nname = 'attic'\njoin = 1\n",
            ["1 lend: blocks 10-40 of atic are not within the stage's 0-14", "1 lend: there is no [[worker]] atic"],
        ),
    ],
)
def test_one_mistake_hides_no_other_and_makes_none_up(more: str, lines: list[str]) -> None:
    said = [line for line in refusal(SMALL + more).splitlines() if line.startswith("[[stage]]")]
    assert len(said) == len(lines)
    for line, begins in zip(said, lines, strict=True):
        assert line.startswith(f"[[stage]] {begins}")


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:7411", "tcp://127.8.0.1:1", "tcp://localhost:0", "tcp://[::1]:5"])
def test_this_machine_needs_no_leave(listen: str) -> None:
    assert file_loader.parse(f"{SMALL}[cluster]\nlisten = '{listen}'", "").cluster.listen == listen


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZrtError) as raised:
        file_loader.load(tmp_path / "none.toml")
    assert (raised.value.kind, raised.value.where) == ("bad_config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", ["folder", "latin"])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin").write_bytes(b"name = '\xe9'")
    with pytest.raises(ZrtError, match="cannot be read") as raised:
        file_loader.load(tmp_path / name)
    assert raised.value.where == str(tmp_path / name)


def conf_of(*stages: Stage) -> Conf:
    return Conf(model=Model("m"), stages=stages)


def test_tp_on_the_command_line_is_that_of_every_stage() -> None:
    conf = conf_of(Stage(Blocks(0, 3)), Stage(tp=4))
    assert file_loader.override(conf, tp=2).stages == (Stage(Blocks(0, 3), tp=2), Stage(tp=2))
    with pytest.raises(ZrtError, match="--tp 0"):
        file_loader.override(conf, tp=0)


def test_the_command_line_says_where_to_listen() -> None:
    conf = conf_of(Stage())
    assert file_loader.override(conf, listen="tcp://127.0.0.1:0").cluster == ClusterSettings(listen="tcp://127.0.0.1:0")
    everywhere = file_loader.override(conf, listen="tcp://0.0.0.0:5", insecure=True)
    assert everywhere.cluster == ClusterSettings(listen="tcp://0.0.0.0:5", insecure=True)
    known = file_loader.override(conf, listen="tcp://0.0.0.0:0", advertise="tcp://box", insecure=True)
    assert known.cluster == ClusterSettings(listen="tcp://0.0.0.0:0", advertise="tcp://box", insecure=True)
    assert file_loader.override(known, advertise="tcp://[fd00::1]").cluster.advertise == "tcp://[fd00::1]"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"listen": "7411"}, "--listen: .*tcp://HOST:PORT"),
        ({"listen": "tcp://0.0.0.0:5"}, "say --insecure"),
        ({"advertise": "box"}, "--advertise: .*tcp://HOST"),
        ({"advertise": "tcp://*"}, "--advertise: .*names no host"),
        ({"listen": "tcp://127.0.0.1:0", "advertise": "tcp://box:7"}, "--advertise: .*leaves its own to the system"),
    ],
)
def test_a_place_on_the_command_line_that_is_off_is_named(words: dict[str, str], says: str) -> None:
    with pytest.raises(ZrtError, match=says) as raised:
        file_loader.override(conf_of(Stage()), **words)  # type: ignore[arg-type]
    assert raised.value.kind == "bad_config"


def test_the_command_line_names_another_model() -> None:
    assert file_loader.override(conf_of(Stage()), model="other").model == Model("other")


@pytest.mark.parametrize(
    ("text", "given", "read"),
    [
        ("[[stage]]", {"model": "other"}, SMALL.replace('"m"', '"other"')),
        ("[model]\ncontext = 9\n[[stage]]", {"model": "m"}, SMALL.replace("\n[[", "\ncontext = 9\n[[")),
        ("[model]\nref = ''\n[[stage]]", {"model": "m"}, SMALL),
        ("[model]\nref = 'm'", {"stages": 3}, SMALL + "[[stage]]\n" * 2),
        ("", {"model": "m", "stages": 1}, SMALL),
        (
            f"{SMALL}[cluster]\nlisten = 'tcp://0.0.0.0:5'",
            {"insecure": True},
            f"{SMALL}[cluster]\nlisten = 'tcp://0.0.0.0:5'\ninsecure = true",
        ),
    ],
)
def test_a_file_may_lack_what_the_command_line_says(
    text: str, given: dict[str, Any], read: str, tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text(text)
    (tmp_path / "whole.toml").write_text(read)
    wanted = ClusterOptions(conf=str(tmp_path / "whole.toml")).read()
    found = ClusterOptions(conf=str(tmp_path / "my.toml"), **given).read()
    assert msgspec.structs.replace(found, where=wanted.where, text=wanted.text) == wanted
    with pytest.raises(ZrtError):
        ClusterOptions(conf=str(tmp_path / "my.toml")).read()


@pytest.mark.parametrize("text", ["model = 3\n[[stage]]", "[cluster]\nlisten = 3\n[[stage]]", "stage = 3"])
def test_what_the_command_line_says_mends_no_other_mistake(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ZrtError, match=r"table|text|no \[\[stage"):
        ClusterOptions(conf=str(tmp_path / "my.toml"), model="m", stages=2, insecure=True).read()


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(SMALL, encoding="utf-8-sig")
    assert file_loader.load(tmp_path / "my.toml").model.ref == "m"


def test_nothing_said_changes_nothing() -> None:
    conf = conf_of(Stage(Blocks(0, 3)), Stage())
    assert file_loader.override(conf) == conf


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_command_line_replaces_the_stages_by_planned_ones(count: int) -> None:
    conf = conf_of(Stage(Blocks(0, 3), replicas=2, threads=2), Stage(Blocks(4, 9), replicas=2, threads=2))
    assert file_loader.override(conf, stages=count).stages == (Stage(replicas=2, threads=2),) * count


@pytest.mark.parametrize(
    ("stages", "model", "says"),
    [(0, None, "--stages 0"), (3, None, "differ"), (None, "", "--model")],
)
def test_what_the_command_line_cannot_say(stages: int | None, model: str | None, says: str) -> None:
    with pytest.raises(ZrtError, match=says) as raised:
        file_loader.override(conf_of(Stage(), Stage(device="cuda:0")), stages=stages, model=model)
    assert raised.value.kind == "bad_config"


@pytest.mark.parametrize(("stage", "expected"), [(Stage(), (16, 8)), (Stage(threads=5), (5, 5))])
def test_threads_not_given_are_all_cores_or_a_share_of_them(stage: Stage, expected: tuple[int, int]) -> None:
    assert file_loader.threads(conf_of(stage, Stage()), stage, 16) == expected


def test_a_conf_cannot_be_changed_by_those_who_read_it() -> None:
    conf = file_loader.load()
    with pytest.raises(AttributeError):
        conf.model.ref = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(conf.model, ref="x").ref == "x"


def test_the_docs_lend_to_another_machine() -> None:
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
    section = page.partition("## Lending layers")[2]
    helped, pinned = (
        file_loader.parse(part.partition("```")[0], "machines.md") for part in section.split("```toml\n")[1:3]
    )
    assert (helped.stages[0].backend, helped.stages[0].lend, helped.workers) == ("layers", (), ())
    assert (pinned.stages[0].lend, pinned.workers) == (
        (LendSettings("attic", Blocks(10, 19)),),
        (Worker("attic", join=True),),
    )


LENDS = '[model]\nref = "m"\n[[stage]]\n[[stage.lend]]\nworker = "attic"\nblocks = "3-4"\n[[worker]]\nname = "attic"\njoin = true\n'


def test_a_stage_may_lend_blocks_to_a_worker() -> None:
    conf = file_loader.parse(LENDS, "")
    assert conf.stages[0].lend == (LendSettings("attic", Blocks(3, 4)),)
    assert conf.workers == (Worker("attic", join=True),)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            '"3-4"',
            '"3"\n[[stage.lend]]\nworker = "attic"\nblocks = "2-3"',
            "[[stage]] 1 lend: 3-3 of attic and 2-3 of attic overlap",
        ),
        ('worker = "attic"', 'worker = "cellar"', "there is no [[worker]] cellar; there are: attic"),
        ("[[stage]]", "[[stage]]\ntp = 2", "a stage with tp 2 lends nothing"),
        ("[[stage]]", "[[stage]]\nreplicas = 2", "so a stage that lends has one replica"),
        ('blocks = "3-4"', "", "[[stage]] 1 lend: [[stage.lend]] 1 lacks blocks"),
        ("[[worker]]", '[[worker]]\nname = "x"\n[[worker]]', "[[worker]] x: no [[stage.lend]] names it"),
        (
            "[[worker]]",
            '[[worker]]\nname = "attic"\n[[worker]]',
            "[[worker]] attic: several have this name; give each one of its own, or leave out all but one",
        ),
        (
            "[[worker]]",
            '[[stage]]\n[[stage.lend]]\nworker = "attic"\nblocks = "9"\n[[worker]]',
            "[[stage]] 2 lend: attic serves [[stage]] 1 already",
        ),
    ],
)
def test_what_cannot_be_lent_is_said(before: str, after: str, said: str) -> None:
    assert said in refusal(LENDS.replace(before, after))


def test_a_name_that_several_workers_have_is_said_once() -> None:
    twice = LENDS.replace('worker = "attic"', 'worker = "cellar"') + '[[worker]]\nname = "attic"\n'
    lines = refusal(twice).splitlines()
    assert "[[stage]] 1 lend: there is no [[worker]] cellar; there are: attic" in lines
    assert [line.partition(":")[0] for line in lines if line.startswith("[[worker]]")] == ["[[worker]] attic"] * 2


@pytest.mark.parametrize(
    ("text", "words"), [(LENDS, {"stages": 2}), (LENDS, {"tp": 2}), (SMALL + 'backend = "layers"', {"tp": 2})]
)
def test_the_command_line_does_not_override_stages_that_lend(text: str, words: dict[str, int]) -> None:
    with pytest.raises(ZrtError, match="lend"):
        file_loader.override(file_loader.parse(text, ""), **words)
