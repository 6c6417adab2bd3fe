"""Weights that are saved anew into the folder a cluster serves: whoever loads from there next is
refused, whatever it is, and serves again once the model is back; or what another coordinator finds
there. Ids are transformers' own."""

import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.clusters import Local, cluster_file, local_cluster
from support.groups import member, ranked
from support.peers import until
from support.tiny_models import reference

from zrt.actors.block_server import assigned_blocks, block_server
from zrt.actors.block_server.assigned_blocks import AssignedBlocks
from zrt.actors.coordinator import coordinator
from zrt.actors.coordinator.coordinator import Coordinator
from zrt.actors.coordinator.fleet import served_model
from zrt.actors.coordinator.fleet.served_model import ServedModel
from zrt.actors.coordinator.prompts.requests import Requests
from zrt.runtime.actor.actor import Actor
from zrt.runtime.client.stream import Stream
from zrt.runtime.cluster.file_loader import parse
from zrt.runtime.errors import Kind, ZrtError
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.members import Assignment
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.tensor_digests import TensorDigests

PROMPT = [5, 17, 99, 3, 42, 42, 7, 120]
TOKENS = 24
SINGLE = "model.safetensors"


class Served:
    """A folder that is served. `anew` is the same model with other weights, or another config."""

    def __init__(self, folder: Path, anew: Path, file: str) -> None:
        self.folder = folder
        self.anew = anew
        self.file = folder / file
        self._old = self.file.read_bytes()
        self._new = (anew / file).read_bytes()
        self.wanted = reference(folder, PROMPT, TOKENS)

    def save_anew(self) -> None:
        self._save(self._new)

    def put_back(self) -> None:
        self._save(self._old)

    def _save(self, data: bytes) -> None:
        """As programs save: whole, under the old name."""
        self.file.with_suffix(".saving").write_bytes(data)
        self.file.with_suffix(".saving").replace(self.file)

    def refused(self, seen: Cluster) -> bool:
        """Whether a process has failed since that file is another model's."""
        return any(info.fault.startswith(f"bad_model: {self.file} (") for info in seen.actors if info.state == "failed")


@pytest.fixture
def served(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Served]:
    def serve(file: str = SINGLE, anew: dict[str, object] | None = None, **options: object) -> Served:
        folder = shutil.copytree(make_model("llama", eos_token_id=None, **options), tmp_path / "model")
        other = make_model("llama", eos_token_id=None, **(options | (anew or {"seed": 1})))
        return Served(folder, other, file)

    return serve


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "LOOK_S", 0.1)


async def told(stream: Stream) -> tuple[list[int], ZrtError | None]:
    """The tokens of a stream, and what it ended with."""
    got: list[int] = []
    try:
        async for piece in stream:
            got += piece.token_ids
    except ZrtError as error:
        return got, error
    return got, None


async def refused_then_serves_again(cluster: Local, model: Served, harm: Callable[[], Awaitable[object]]) -> None:
    """Save the weights anew, harm the cluster, see that it refuses what is there; put the old ones
    back, and see that it serves them, by itself."""
    assert await cluster.greedy(PROMPT, TOKENS) == model.wanted
    model.save_anew()
    await harm()
    await cluster.until(model.refused)
    model.put_back()
    await cluster.until(lambda seen: seen.ready)
    assert await cluster.greedy(PROMPT, TOKENS) == model.wanted


@pytest.mark.parametrize(
    ("file", "anew"),
    [(SINGLE, {"seed": 1}), ("config.json", {"rms_norm_eps": 0.25})],
    ids=["weights", "config"],
)
async def test_a_stage_that_is_started_again_does_not_serve_another_model(
    served: Callable[..., Served], file: str, anew: dict[str, object]
) -> None:
    model = served(file, anew, max_position_embeddings=4096)
    async with local_cluster(model.folder, ["0-1", "2-3"], model_context=4096) as cluster:
        long = cluster.client.generate(token_ids=PROMPT, max_tokens=3000, temperature=0.0)
        got = list((await anext(aiter(long))).token_ids)

        async def restart() -> None:
            await cluster.lose("stage1")
            await cluster.join("stage1")

        model.save_anew()
        await restart()
        seen = await cluster.until(lambda seen: bool(seen.fault))
        assert f"bad_model: {model.file} (" in seen.fault
        more, error = await told(long)
        got += more
        assert error is not None
        assert (error.kind, str(model.file) in error.message) == ("bad_model", True)
        with pytest.raises(ZrtError, match=str(model.file)) as refusal:
            await cluster.greedy(PROMPT, TOKENS)
        assert refusal.value.kind == "bad_model"
        model.put_back()
        await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == model.wanted
    assert got[:TOKENS] == model.wanted[: len(got)]


@pytest.mark.parametrize("missing", ["config.json", SINGLE, ".", ".."], ids=["config", "weights", "folder", "parent"])
async def test_a_stage_that_is_started_while_its_model_is_away_loads_it_once_it_is_back(
    served: Callable[..., Served], missing: str
) -> None:
    model = served()
    place = (model.folder / missing).resolve()
    away = place.with_name(f"{place.name}.away")
    async with local_cluster(model.folder, ["0-1", "2-3"]) as cluster:
        place.rename(away)
        try:
            await cluster.lose("stage1")
            await cluster.join("stage1")
            seen = await cluster.until(lambda seen: bool(seen.fault))
            assert "bad_model: " in seen.fault
            with pytest.raises(ZrtError) as refusal:
                await cluster.greedy(PROMPT, TOKENS)
            assert refusal.value.kind == "bad_model"
        finally:
            away.rename(place)
        await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == model.wanted


@pytest.mark.parametrize("stage", ["stage0", "stage1"])
async def test_a_block_server_that_joins_with_another_revision_takes_no_stage(
    served: Callable[..., Served], stage: str
) -> None:
    model = served()
    async with local_cluster(model.folder, ["0-1", "2-3"]) as cluster:

        async def another_joins() -> None:
            await cluster.join("another")
            await cluster.lose(stage)

        await refused_then_serves_again(cluster, model, another_joins)


async def test_ranks_that_start_again_do_not_serve_another_model(served: Callable[..., Served]) -> None:
    model = served()
    async with ranked(model.folder, (2,)) as cluster:

        async def kill_a_rank() -> None:
            os.kill(member(cluster, 1).child.pid, signal.SIGKILL)

        await refused_then_serves_again(cluster, model, kill_a_rank)


async def test_a_worker_that_is_back_is_sent_nothing_of_another_model(served: Callable[..., Served]) -> None:
    model = served()
    async with local_cluster(model.folder, [None], lend={"attic": ["1-2"]}) as cluster:
        sent = {file: file.stat().st_mtime_ns for file in cluster.cache.rglob("*")}

        async def restart_the_worker() -> None:
            await cluster.workers["attic"].stop()
            await cluster.join_worker("attic")

        await refused_then_serves_again(cluster, model, restart_the_worker)
        assert {file: file.stat().st_mtime_ns for file in cluster.cache.rglob("*")} == sent


@pytest.mark.parametrize("kind", ["deadline", "cancelled", "bad_model"])
async def test_a_coordinator_that_cannot_tell_which_model_it_serves_is_asked_again(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """It has much to hash, stops, or cannot read its own files."""
    model, differing = served(), ServedModel.differing
    monkeypatch.setattr(assigned_blocks, "UNSURE_S", 0.1)
    asked: list[object] = []

    def at_first_not(self: ServedModel, *question: Any) -> list[str]:
        asked.append(question)
        if len(asked) == 1:
            raise ZrtError(kind, "cannot read /the/coordinators.safetensors")
        return differing(self, *question)

    monkeypatch.setattr(ServedModel, "differing", at_first_not)
    async with local_cluster(model.folder, [None]) as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == model.wanted
        told = [event.text for event in cluster.coordinator.event_log.since(0)]
        assert any("/the/coordinators.safetensors" in text for text in told) == (kind == "bad_model")
    assert len(asked) == 2


async def test_what_the_coordinator_has_no_file_of_is_what_serves_and_not_what_failed(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, confirm = served(), AssignedBlocks.confirm
    failed: list[str] = []

    def no_file(folder: Path) -> None:
        raise ZrtError("bad_model", f"{folder} has no weights")

    async def fail_once(blocks: AssignedBlocks, assignment: Assignment) -> None:
        await confirm(blocks, assignment)
        if not failed:
            failed.append("wrong weights")
            model.put_back()
            raise ZrtError("bad_model", "these are the wrong weights")

    monkeypatch.setattr(AssignedBlocks, "confirm", fail_once)
    with monkeypatch.context() as coordinators:
        coordinators.setattr(served_model.CheckpointIndex, "open", no_file)
        other = ServedModel(model.folder, read_spec(model.folder), random=False, digests=TensorDigests())
    monkeypatch.setattr(coordinator, "ServedModel", lambda *_, **__: other)
    model.save_anew()
    async with local_cluster(model.folder, [None], waits=False) as cluster:
        await cluster.until(lambda seen: seen.ready)
        assert await cluster.greedy(PROMPT, TOKENS) == model.wanted
        assert other._claims == {}
    assert failed


@pytest.mark.parametrize("what", ["ranks", "worker"])
async def test_what_breaks_between_its_load_and_its_first_session_is_built_again(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The coordinator's last word that it is the model comes when it has broken."""
    model, confirm = served(), AssignedBlocks.confirm
    broken: list[object] = []

    async def last_word(blocks: AssignedBlocks, assignment: Assignment) -> None:
        await confirm(blocks, assignment)
        backend = blocks.group or blocks.lending.lent
        if backend is None or broken:
            return
        broken.append(backend)
        if blocks.group is not None:
            os.kill(blocks.group.processes.members[0].child.pid, signal.SIGKILL)
        else:
            blocks.lending.peer_died(blocks.lending._workers.by_name["attic"].address)
        await until(lambda: backend.broken is not None)

    monkeypatch.setattr(AssignedBlocks, "confirm", last_word)
    ranks = what == "ranks"
    running = ranked(model.folder, (2,)) if ranks else local_cluster(model.folder, [None], lend={"attic": ["1-2"]})
    async with running as cluster:
        assert await cluster.greedy(PROMPT, TOKENS) == model.wanted
        blocks = cluster.servers[0].blocks
        assert cluster.servers[0].turns.backend is (blocks.group or blocks.lending.lent)
    assert len(broken) == 1
    assert blocks.group is not broken[0]


@pytest.mark.parametrize("found", ["the same", "saved anew", "other files"])
async def test_block_servers_serve_another_coordinator_only_the_model_that_it_serves(
    served: Callable[..., Served], found: str
) -> None:
    """What they hold is read again only if their own files are others now."""
    model = served()
    async with local_cluster(model.folder, ["0-1", "2-3"]) as cluster:
        old, loads = cluster.coordinator, [server.blocks._content for server in cluster.servers]
        await Actor.stop(old)
        if found == "saved anew":
            model.save_anew()
        text = cluster_file(model.folder, ["0-1", "2-3"], cluster_listen=old.endpoint)
        conf, spec = parse(text, "test"), read_spec(model.folder)
        new = Coordinator(conf, model.folder, spec, Requests(model.folder, spec, 256), cluster=old.cluster, port_s=5.0)
        if found == "other files":  # as on another machine, where other files have that path
            new.membership._model = ServedModel(model.anew, spec, random=False, digests=TensorDigests())
        await new.start()
        try:
            if found == "other files":
                await until(lambda: all(info.state == "failed" for info in new.snapshot().actors if info.stage >= 0))
                await cluster.until(model.refused)
                with pytest.raises(ZrtError) as refusal:
                    await cluster.greedy(PROMPT, TOKENS)
                assert refusal.value.kind == "bad_model"
            else:
                wanted = reference(model.folder, PROMPT, TOKENS)
                await cluster.until(lambda seen: seen.ready)
                assert await cluster.greedy(PROMPT, TOKENS) == wanted
                assert (wanted == model.wanted) == (found == "the same")
            now = [server.blocks._content for server in cluster.servers]
            assert [one is other for one, other in zip(now, loads, strict=True)] == [found != "saved anew"] * 2
        finally:
            await new.stop()
