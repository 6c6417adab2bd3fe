"""A layer worker, driven by hand-made documented messages: MessagePack maps over a DEALER, nothing
of zrt's on this side."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.chained import Pipeline
from support.layer_masters import CONTEXT, NAMES, loaded, worker_at

from zrt.runtime.compute.layer_engine import runs_of
from zrt.runtime.compute.turn import BatchStep


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", num_hidden_layers=6)


def expected(model: Path, parts: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """What blocks 1 to 4 make of these steps of one session."""
    pipeline = Pipeline(model, [(1, 4)], torch.float32, CONTEXT, 1 << 24)
    pipeline.open("s")
    return [pipeline.stages[0].forward([BatchStep("s", at, x.shape[1])], x[0]).unsqueeze(0) for at, x in parts]


def rows(n: int) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("kind", ["SingleOp", "Batch"])
async def test_layers_run_as_the_model_does_and_goodbye_ends_the_session(
    model: Path, tmp_path: Path, kind: str
) -> None:
    parts = [(0, rows(5)), (5, rows(1)), (6, rows(1))]
    wanted = expected(model, parts)
    async with worker_at(tmp_path) as peer:
        hello = await peer.ask("Hello")
        assert hello["type"] == "WorkerInfo"
        assert (hello["os"], hello["device"], hello["device_idx"]) == ("linux", "cpu", 0)
        await loaded(peer, model, single=kind == "SingleOp")
        for _ in range(2):
            for (at, x), want in zip(parts, wanted, strict=True):
                if kind == "Batch":
                    x = await peer.op("Batch", x, NAMES, at)
                else:
                    for name in NAMES:
                        x = await peer.op("SingleOp", x, [name], at)
                assert torch.allclose(x, want, atol=1e-5)
            goodbye = await peer.ask("Goodbye")
            assert (goodbye["type"], goodbye["dtype"]) == ("WorkerInfo", "F32")
            raw = {"data": rows(1).numpy().tobytes(), "dtype": 5, "shape": [1, 1, 64]}
            names = NAMES if kind == "Batch" else NAMES[:1]
            gap = await peer.ask("Batch", x=raw, batch=[[name, 7, int(name[-1])] for name in names])
            assert str(gap["message"]).startswith("kv_gap: ")


async def test_a_program_that_knows_the_documented_messages_alone_drives_it(model: Path, tmp_path: Path) -> None:
    async with worker_at(tmp_path) as peer:
        program = Path(__file__).parents[1] / "support" / "layer_peer.py"
        words = (str(program), peer.worker.endpoint, str(model), str(CONTEXT))
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=subprocess.PIPE)
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        assert process.returncode == 0
        told = json.loads(out)
    assert told["zrt"] == []
    assert told["needs_data"]
    assert told["said"] == {
        "Hello": "WorkerInfo",
        "PrepareLayers": "LayersPrepared",
        "LayerAssignment": "LayerAssignmentAck",
        "ModelDataChunk": "ModelDataTaken",
        "ModelDataDone": "WorkerReady",
        "Batch": "Tensor",
        "SingleOp": "Tensor",
        "Goodbye": "WorkerInfo",
    }
    assert (told["info"]["os"], told["goodbye"]) == ("linux", "F32")
    prompt = torch.tensor(told["prompt"]).view(1, 5, 64)
    first, second = expected(model, [(0, prompt), (5, prompt[:, :1])])
    assert torch.allclose(torch.tensor(told["batch"]), first.flatten(), atol=1e-5)
    assert torch.allclose(torch.tensor(told["single"]), second.flatten(), atol=1e-5)
    assert told["gap"].startswith("kv_gap: ")


async def test_a_failed_op_leaves_the_kv_as_it_was(model: Path, tmp_path: Path) -> None:
    parts = [(0, rows(5)), (5, rows(1))]
    wanted = expected(model, parts)
    async with worker_at(tmp_path) as peer:
        await loaded(peer, model, single=True)
        await peer.op("Batch", parts[0][1], NAMES, 0)
        raw = {"data": rows(1).numpy().tobytes(), "dtype": 5, "shape": [1, 1, 64]}
        for batch in ([[NAMES[0], 5, 1], ["model.layers.5", 5, 5]], [[NAMES[0], 5, 1], ["lm_head", 5, 2]], []):
            assert (await peer.ask("Batch", x=raw, batch=batch))["type"] == "WorkerError"
        # the first layer is one token ahead of the others now, and a batch of all begins at its end
        await peer.op("SingleOp", rows(1), NAMES[:1], 5)
        failed = await peer.ask("Batch", x=raw, batch=[[name, 6, int(name[-1])] for name in NAMES])
        assert str(failed["message"]).startswith("kv_gap: ")
        assert torch.allclose(await peer.op("Batch", parts[1][1], NAMES, 5), wanted[1], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "Explode"}, "unknown_op"),
        ({"type": "WorkerReady"}, "unknown_op"),
        ({"type": "ModelDataDone"}, "bad_request"),
        ({"type": "LayerAssignment", "layers": ["model.layers.1"], "model_hash": ""}, "bad_request: PrepareLayers"),
        (
            {
                "type": "SingleOp",
                "layer_name": NAMES[0],
                "x": {"data": b"", "dtype": 5, "shape": [1, 0, 64]},
                "index_pos": 0,
                "block_idx": 1,
            },
            "model_not_loaded",
        ),
    ],
)
async def test_what_it_cannot_do_is_said_in_words(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    async with worker_at(tmp_path) as peer:
        kind = str(fields.pop("type"))
        answer = await peer.ask(kind, **fields)
        assert answer["type"] == "WorkerError"
        assert str(answer["message"]).startswith(said)


async def test_a_layer_that_the_model_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    text = (model / "config.json").read_text()
    settings = {"dtype": "float32", "kv_bytes": 1 << 20, "context": CONTEXT, "sessions": 4, "random": True}
    async with worker_at(tmp_path) as peer:
        await peer.ask("PrepareLayers", config_json=text, **settings)
        await peer.ask("LayerAssignment", layers=["model.layers.0", "model.layers.6"], model_hash="")
        answer = await peer.ask("ModelDataDone")
        assert answer["message"] == "bad_request: layers 6-6: this model has layers 0-5"


def test_consecutive_layers_are_runs() -> None:
    assert runs_of([1, 2, 3, 5, 7, 8]) == [(1, 3), (5, 5), (7, 8)]
