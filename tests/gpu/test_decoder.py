"""A shard on a GPU computes what it computes on the CPU, for every family; graphs and eager
forwards agree bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.chained import Pipeline
from support.tiny_models import LONG_PROMPT, MODELS
from torch import Tensor

from zrt.runtime.compute.decoder.decoder import Decoder
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.compute.sampler import Sampler
from zrt.runtime.compute.turn import BatchStep, Work
from zrt.runtime.compute.weight_sources import open_checkpoint
from zrt.runtime.messages.sampling import Sampling
from zrt.runtime.models.architecture.spec import read_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TEXT = torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = {"one stage": ((0, 3),), "two stages": ((0, 1), (2, 3))}
GREAT = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
GREAT |= {"num_key_value_heads": 2, "head_dim": 128, "initializer_range": 0.03}


class GpuPipeline(Pipeline):
    """The same shards on a GPU."""

    def __init__(self, folder: Path, cuts: Sequence[tuple[int, int]], dtype: torch.dtype, *, graphs: bool = True):
        from zrt.runtime.compute.cuda.gpu_forward import GpuForward

        self.spec = read_spec(folder)
        source = open_checkpoint(folder)
        self.stages, self.forwards = [], []
        for cut in cuts:
            shard = Shard.load(self.spec, source, cut, dtype=dtype, device="cuda:0")
            cache = PagedKVCache(self.spec, cut, dtype=dtype, device="cuda:0", budget=1 << 24, context=256, sessions=8)
            forward = GpuForward(shard, cache, 8)
            if graphs:
                forward.capture()
            self.forwards.append(forward)
            self.stages.append(Decoder(shard, cache, forward))

    def forward(self, steps: Sequence[BatchStep], x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(steps, x).cpu()
        return x


def on_cpu(folder: Path, dtype: torch.dtype = torch.float32) -> Pipeline:
    return Pipeline(folder, CUTS["one stage"], dtype, 256, 1 << 24)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_are_those_of_the_cpu(name, cuts, make_model) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    wanted_ids, wanted = on_cpu(folder).generate("s", LONG_PROMPT, 64)
    ids, logits = GpuPipeline(folder, cuts, torch.float32).generate("s", LONG_PROMPT, 64)
    assert ids == wanted_ids
    assert (logits - wanted).abs().max() <= 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_near_those_of_the_cpu_in_float32(name, make_model) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    wanted = _logits(on_cpu(folder))
    theirs = (_logits(on_cpu(folder, torch.bfloat16)) - wanted).abs().max()
    ours = (_logits(GpuPipeline(folder, CUTS["one stage"], torch.bfloat16)) - wanted).abs().max()
    assert ours <= max(1.5 * theirs, 2e-2 * wanted.abs().max())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_products_of_one_row_are_those_of_the_cpu(family, make_model) -> None:
    folder = make_model(family, **GREAT)
    ours = GpuPipeline(folder, CUTS["one stage"], torch.float32)
    assert ours.forwards[0].is_plain
    wanted_ids, wanted = on_cpu(folder).generate("s", TEXT, 48)
    ids, logits = ours.generate("s", TEXT, 48)
    assert ids == wanted_ids
    assert (logits - wanted).abs().max() <= 1e-3


@pytest.mark.parametrize("count", [1, 3, 8])
def test_graphs_and_eager_forwards_agree(count, make_model) -> None:
    folder = make_model("qwen3", **GREAT)
    seen = []
    for graphs in (True, False):
        pipeline = GpuPipeline(folder, CUTS["one stage"], torch.bfloat16, graphs=graphs)
        keys = range(count)
        pipeline.open(*keys)
        prompts = [TEXT[key : key + 32] for key in keys]  # of a size that is not padded
        for key in keys:
            pipeline.logits(key, 0, prompts[key])
        steps = [BatchStep(key, len(prompts[key]), 1) for key in keys]
        seen.append(pipeline.forward(steps, torch.tensor([7 + key for key in keys])))
    if count in (1, 8):  # nor are these
        assert torch.equal(*seen)
    assert torch.allclose(*seen, atol=2e-2 * float(seen[0].abs().max()))


def test_a_batch_of_many_kinds_is_each_alone(make_model) -> None:
    folder = make_model("qwen3", **MODELS["qwen3"].config)
    wanted, ours = on_cpu(folder), GpuPipeline(folder, CUTS["two stages"], torch.float32)
    for pipeline in (wanted, ours):
        pipeline.open("a", "b", "c")
        pipeline.logits("a", 0, TEXT[:20])
        pipeline.logits("c", 0, TEXT[:7])
    steps = [BatchStep("a", 20, 1), BatchStep("b", 0, 9), BatchStep("c", 7, 5)]
    x = torch.tensor(TEXT[20:35])
    assert (wanted.forward(steps, x) - ours.forward(steps, x)).abs().max() <= 1e-3


HEATS = {"greedy": [0.0] * 3, "sampled": [0.7] * 3, "both": [0.0, 0.7, 1.3]}


@pytest.mark.parametrize("heats", HEATS.values(), ids=HEATS)
def test_tokens_begun_ahead_are_those_of_the_cpu_and_are_dropped_where_a_session_goes_another_way(
    heats, make_model
) -> None:
    folder = make_model("qwen3", **GREAT)
    pipeline, cpu = GpuPipeline(folder, CUTS["one stage"], torch.float32), on_cpu(folder).stages[0]
    gpu = pipeline.stages[0]
    engines = [Engine(decoder.shard, decoder.cache, decoder) for decoder in (gpu, cpu)]
    for engine in engines:
        engine.turn([Work(key, 0, 5 + key, torch.tensor(TEXT[: 5 + key]), opens=5 + key) for key in range(3)])
    said = [_go_on(engine, heats, [0, 1, 2], 7, 40) for engine in engines]
    assert said[0] == said[1]
    assert pipeline.forwards[0].has_begun_next
    said = [_go_on(engine, heats, [0, 2], 9, 20) for engine in engines]  # one less, and other tokens
    assert said[0] == said[1]
    for engine in engines:
        engine.truncate(0, 30)
        engine.truncate(2, 30)
    said = [_go_on(engine, heats, [0, 2], 9, 20) for engine in engines]
    assert said[0] == said[1]


def _go_on(engine: Engine, heats: list[float], keys: list[int], first: int, tokens: int) -> list[list[int]]:
    samplers = {key: Sampler(Sampling(temperature=heats[key], top_p=0.95, top_k=40, seed=key)) for key in keys}
    rows = {key: [first] for key in keys}
    for _ in range(tokens):
        works = [Work(key, engine.have(key), 1, torch.tensor(row[-1:]), samplers[key]) for key, row in rows.items()]
        for row, outcome in zip(rows.values(), engine.turn(works).outcomes, strict=True):
            assert outcome.picked is not None, outcome.fault
            row.append(outcome.picked.token)
    return list(rows.values())


def _logits(pipeline: Pipeline) -> Tensor:
    """After a prompt, then token by token."""
    pipeline.open("s")
    rows = [pipeline.logits("s", 0, TEXT[:24], 24)]
    rows += [pipeline.logits("s", at, TEXT[at : at + 1], at + 1) for at in range(24, len(TEXT))]
    return torch.stack(rows)
