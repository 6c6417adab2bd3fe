"""A model split over ranks computes what transformers' models compute, and each rank reads and
holds its own part only."""

import os
from dataclasses import replace

import pytest
import torch
from support.ranked import RankedPipeline, on_ranks
from support.tiny_models import LONG_PROMPT, MODELS, SHORT_PROMPT

from zrt.runtime.compute.cpu.cpu_forward import cpu_decoder
from zrt.runtime.compute.decoder.linear import DenseLinear
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.weight_sources import RandomCheckpoint, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.formats.dense import FLOAT32
from zrt.runtime.models.checkpoint.layout import shard_bytes, shard_shapes
from zrt.runtime.models.checkpoint.split import RankPart, check_split, part_bytes, works

TOKENS = 64
WHOLE = ((0, 3),)
STAGES = ((0, 1), (2, 3))
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "head_dim": 16}
ONE_A_FAMILY = {tiny.family: name for name, tiny in reversed(MODELS.items())}
OFTEN = [
    pytest.param(
        "llama", SIX | {"vocab_size": 157}, 3, STAGES, True, id="three ranks, odd vocabulary, tied, two stages"
    ),
    pytest.param("qwen2", SIX | {"num_key_value_heads": 1}, 3, STAGES, False, id="three ranks share a kv head"),
    pytest.param("phi3", {"vocab_size": 151}, 2, STAGES, False, id="two ranks, fused, two stages"),
]
RARELY = [
    pytest.param("llama", SIX | {"vocab_size": 157}, 3, WHOLE, False, id="three ranks, odd vocabulary"),
    pytest.param("qwen3", {"head_dim": 16, "vocab_size": 151}, 4, STAGES, True, id="four ranks, tied, two stages"),
    *(
        pytest.param(MODELS[name].family, MODELS[name].config, tp, WHOLE, False, id=f"{name}-tp{tp}")
        for name in MODELS
        for tp in (2, 4)
    ),
]


@pytest.mark.parametrize(
    ("family", "config", "tp", "cuts", "tied"),
    [*OFTEN, *(pytest.param(*one.values, id=one.id, marks=pytest.mark.chaos) for one in RARELY)],
)
def test_greedy_ids_equal_those_of_generate_over_64_tokens(
    family, config, tp, cuts, tied, make_model, generated
) -> None:
    folder = make_model(family, tied=tied, **config)
    prompt = SHORT_PROMPT if read_spec(folder).rope_switch else LONG_PROMPT
    wanted_ids, wanted = generated(folder, prompt)
    for ids, logits in on_ranks(tp, lambda group: RankedPipeline(folder, cuts, group).generate("s", prompt, TOKENS)):
        assert ids == wanted_ids
        assert (logits - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ONE_A_FAMILY.values())
def test_every_family_can_be_split(name, make_model, reference) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    rope_length = read_spec(folder).rope_length(len(LONG_PROMPT), len(LONG_PROMPT))
    with torch.no_grad():
        wanted = reference(folder)(torch.tensor([LONG_PROMPT])).logits[0]

    def logits(group):
        pipeline = RankedPipeline(folder, WHOLE, group)
        pipeline.open("s")
        return [
            pipeline.logits("s", first, LONG_PROMPT[first:last], rope_length)
            for first, last in ((0, 40), (40, 49), (49, 50))
        ]

    for got in on_ranks(2, logits):
        for row, position in zip(got, (39, 48, 49), strict=True):
            assert (row - wanted[position]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama-biases", "olmo2", "gemma2", "phi3"])
def test_bfloat16_errs_from_float32_little_more_than_transformers_does(name, make_model, reference) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    exact, rounded = (_last_logits(reference(folder, dtype)) for dtype in (torch.float32, torch.bfloat16))

    def logits(group):
        pipeline = RankedPipeline(folder, WHOLE, group, dtype=torch.bfloat16)
        pipeline.open("s")
        return pipeline.logits("s", 0, SHORT_PROMPT)

    assert (on_ranks(2, logits)[0] - exact).square().mean() <= 1.5**2 * (rounded - exact).square().mean()


def _last_logits(model):
    with torch.no_grad():
        return model(torch.tensor([SHORT_PROMPT])).logits[0, -1].float()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_random_weights_are_the_same_model_at_every_size(tp, make_model, pipeline) -> None:
    folder = make_model("qwen3", **MODELS["qwen3"].config)
    spec = replace(read_spec(folder), init_range=0.15)

    def logits(group):
        split = RankedPipeline(folder, STAGES, group, source=RandomCheckpoint(spec))
        split.open("s")
        return split.logits("s", 0, SHORT_PROMPT)

    whole = Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32)
    one = pipeline(folder)
    one.stages[0] = cpu_decoder(whole, one.stages[0].cache)
    one.open("s")
    wanted = one.logits("s", 0, SHORT_PROMPT)
    assert (on_ranks(tp, logits)[0] - wanted).abs().max() <= 1e-4


# ---- what a rank reads and holds -----------------------------------------------------------------


class Alone:
    """A rank that only loads."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world


def whole_everywhere(spec):
    """Bytes in float32 of what no rank can do without: norms, and the biases of sums."""
    shapes = shard_shapes(spec, 0, spec.num_blocks - 1)
    return 4 * sum(
        shape[0] for name, shape in shapes.items() if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-odd", "llama-one-kv-head", "olmo2", "phi3", "gemma3"])
def test_a_rank_holds_and_reads_its_share_and_what_cannot_be_split(name, tp, make_model, monkeypatch) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    spec = read_spec(folder)
    read = 0
    preadv = os.preadv

    def counted(*arguments):
        nonlocal read
        count = preadv(*arguments)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    whole = shard_bytes(spec, 0, 3, FLOAT32)
    fixed = whole_everywhere(spec)
    row = 4 * spec.hidden_size
    kv_matrix = 2 * spec.num_kv_heads * spec.head_dim * row * spec.num_blocks
    extra = kv_matrix * (RankPart(0, tp).shares(spec) - 1) / tp
    padding = row * (1 if spec.tied else 2)
    for rank in range(tp):
        read = 0
        shard = Shard.load(spec, open_checkpoint(folder), (0, 3), dtype=torch.float32, group=Alone(rank, tp))
        assert shard.nbytes == part_bytes(spec, RankPart(rank, tp), 0, 3, FLOAT32)
        assert read <= shard.nbytes <= read + 2 * padding * spec.vocab_size
        assert shard.nbytes <= 1.05 * ((whole - fixed) / tp + fixed + extra + padding)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llama-biases", "phi3", "llama-odd"])
def test_the_parts_of_all_ranks_are_the_whole(name, tp, make_model) -> None:
    folder = make_model(MODELS[name].family, **MODELS[name].config)
    spec = read_spec(folder)
    whole = Shard.load(spec, open_checkpoint(folder), (0, 3), dtype=torch.float32)
    parts = [
        Shard.load(spec, open_checkpoint(folder), (0, 3), dtype=torch.float32, group=Alone(r, tp)) for r in range(tp)
    ]
    names = torch.arange(spec.vocab_size)
    assert torch.equal(
        _rows(whole.embedding, names),
        torch.cat([_rows(part.embedding.own, own) for part, own in _own_names(parts, names)]),
    )
    for number, block in enumerate(whole.blocks):
        held = [part.blocks[number] for part in parts]
        hidden = torch.arange(spec.hidden_size)
        assert torch.equal(torch.cat([_rows(one.o.product, hidden) for one in held], 1), _rows(block.o, hidden))
        assert torch.equal(torch.cat([_rows(one.down.product, hidden) for one in held], 1), _rows(block.down, hidden))
        inner = torch.arange(2 * spec.intermediate_size)
        gates = [_rows(one.gate_up, inner[: len(inner) // tp]).chunk(2) for one in held]
        stacked = torch.cat([*(gate for gate, _ in gates), *(up for _, up in gates)])
        assert torch.equal(stacked, _rows(block.gate_up, inner))


def _rows(layer, numbers):
    """Rows of a layer's weight, however it is kept."""
    width = layer.weight.shape[1] if isinstance(layer, DenseLinear) else layer.shape[1]
    out = torch.empty(len(numbers), width)
    layer.rows(numbers, out)
    return out


def _own_names(parts, names):
    """Each part, and the numbers that the rows it holds have within it."""
    count = -(-len(names) // len(parts))
    return [(part, torch.arange(len(held))) for part, held in zip(parts, names.split(count), strict=True)]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}, [1, 3]),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, [1, 2, 4]),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}, [1, 2, 6]),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 98}, [1, 2]),
    ],
    ids=["nine heads", "four heads", "six heads, two kv heads", "an odd MLP"],
)
def test_what_cannot_be_split_is_refused_with_the_sizes_that_work(config, sizes, make_model) -> None:
    spec = read_spec(make_model("llama", **config))
    assert works(spec) == sizes
    for tp in range(1, 10):
        if tp in sizes:
            check_split(spec, tp)
            continue
        with pytest.raises(ZrtError, match=f"tp = {tp} .*sizes that work: {', '.join(map(str, sizes))}$") as caught:
            check_split(spec, tp)
        assert caught.value.kind == "bad_config"
