"""What a plan takes of memory: weights, KV and the process, stage by stage, against what there
is."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.cluster.file_schema import Conf, Kv, LendSettings, Limits, Model, Spares, Stage, Worker
from zrt.runtime.cluster.gpu_memory import gpu_needs, gpu_shortage
from zrt.runtime.cluster.memory import COORDINATOR_BYTES, Needs, needs, process_bytes, shortage, wishes
from zrt.runtime.cluster.partition import Blocks, Wish
from zrt.runtime.cluster.seats import stage_ranges
from zrt.runtime.errors import ZrtError
from zrt.runtime.formatting import byte_size
from zrt.runtime.models.architecture.spec import ModelSpec, spec_from_config
from zrt.runtime.models.checkpoint.formats.dense import BFLOAT16
from zrt.runtime.models.checkpoint.layout import PAGE_TOKENS, kv_token_bytes, shard_bytes

MIB, GIB = 1 << 20, 1 << 30
LLAMA_8B = spec_from_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)


def conf(*stages: Stage, kv: int = GIB, dtype: str = "bfloat16", context: int = 4096) -> Conf:
    return Conf(model=Model("m", dtype, context), stages=stages, kv=Kv(kv))


def needed(conf: Conf, available: int = 1 << 50, spec: ModelSpec = LLAMA_8B) -> Needs:
    return needs(conf, spec, stage_ranges(conf, spec), available)


def test_each_stage_takes_its_weights_its_kv_and_its_process() -> None:
    found = needed(conf(Stage(), Stage(replicas=2)))
    assert [(stage.name, str(stage.blocks)) for stage in found.stages] == [("stage0", "0-15"), ("stage1", "16-31")]
    for stage in found.stages:
        page = PAGE_TOKENS * len(stage.blocks) * kv_token_bytes(LLAMA_8B, "bfloat16")
        assert stage.weight_bytes == shard_bytes(LLAMA_8B, stage.blocks.first, stage.blocks.last, BFLOAT16)
        assert (stage.kv_bytes, stage.kv_page_bytes, stage.kv_tokens) == (GIB, page, GIB // page * PAGE_TOKENS)
        assert stage.total_bytes == stage.weight_bytes + GIB + stage.process_bytes
    first, second = found.stages
    assert found.needed_bytes == COORDINATOR_BYTES + first.total_bytes + 2 * second.total_bytes
    assert (found.context, found.available_bytes) == (4096, 1 << 50)


def test_ranks_share_weights_and_kv_and_are_processes_of_their_own() -> None:
    whole, split = needed(conf(Stage())).stages[0], needed(conf(Stage(tp=4))).stages[0]
    assert whole.weight_bytes < split.weight_bytes < 1.001 * whole.weight_bytes  # norms are on each
    assert (split.kv_bytes, split.kv_tokens) == (whole.kv_bytes, whole.kv_tokens)
    assert split.process_bytes == 4 * whole.process_bytes


def test_kv_heads_that_several_ranks_hold_take_room_on_each() -> None:
    whole, split = needed(conf(Stage())).stages[0], needed(conf(Stage(tp=16))).stages[0]
    assert split.kv_page_bytes == 2 * whole.kv_page_bytes
    assert split.kv_tokens == whole.kv_tokens // 2


def test_a_size_that_cannot_be_split_is_refused_with_those_that_work() -> None:
    with pytest.raises(ZrtError, match="sizes that work: 1, 2, 4, 8, 16, 32") as caught:
        needed(conf(Stage(tp=3)))
    assert caught.value.kind == "bad_config"


def test_all_that_does_not_fit_the_model_is_told_with_the_file() -> None:
    first = Stage(Blocks(0, 14), tp=3)
    second = Stage(Blocks(15, 35), lend=(LendSettings("attic", Blocks(14, 16)),))
    with pytest.raises(ZrtError) as caught:
        stage_ranges(msgspec.structs.replace(conf(first, second), where="my.toml"), LLAMA_8B)
    assert (caught.value.kind, caught.value.where) == ("bad_config", "my.toml")
    assert [
        line[: len("[[stage]] 2 blocks: 15-35, but the model has 0-31")] for line in caught.value.message.splitlines()
    ] == [
        "[[stage]] 1: tp = 3 cannot split 32 heads, 8 kv h",
        "[[stage]] 2 blocks: 15-35, but the model has 0-31",
        "[[stage]] 2 lend: blocks 14-16 of attic are not w",
    ]


def test_a_mistake_that_many_stages_share_is_told_once() -> None:
    stages = [Stage(tp=7), Stage(tp=1), Stage(tp=7), Stage(tp=3), Stage(tp=7)]
    with pytest.raises(ZrtError) as caught:
        stage_ranges(conf(*stages), LLAMA_8B)
    told = [line.partition(" cannot")[0] for line in caught.value.message.splitlines()]
    assert told == ["[[stage]] 1, 3, 5: tp = 7", "[[stage]] 4: tp = 3"]


def test_the_tightest_stage_sets_the_kv_room() -> None:
    found = needed(conf(Stage(Blocks(0, 23)), Stage(Blocks(24, 31))))
    assert found.kv_tokens == min(stage.kv_tokens for stage in found.stages) == found.stages[0].kv_tokens


def test_the_context_is_no_longer_than_the_model_allows() -> None:
    assert needed(conf(Stage(), context=100_000)).context == 8192


def test_weights_and_kv_on_another_device_are_not_of_the_machine() -> None:
    found = needed(conf(Stage(), Stage(device="cuda:0")))
    assert found.needed_bytes == COORDINATOR_BYTES + found.stages[0].total_bytes + found.stages[1].process_bytes


def test_what_fits_exactly_is_enough_and_a_byte_less_is_not() -> None:
    exact = needed(conf(Stage(), Stage())).needed_bytes
    assert shortage(needed(conf(Stage(), Stage()), exact)) is None
    error = shortage(needed(conf(Stage(), Stage()), exact - 1))
    assert error is not None
    assert error.kind == "insufficient_memory"


def test_a_shortage_of_the_machine_is_told_with_every_number() -> None:
    error = shortage(needed(conf(Stage(), Stage(replicas=2)), 10 * GIB))
    assert error is not None
    assert error.message == (
        "the cluster needs 27.0 GiB of this machine's memory, and 10.0 GiB are available. "
        "stage0 (blocks 0-15) needs 9.0 GiB (weights 7.5 GiB, KV 1.0 GiB, the process 506.5 MiB); "
        "stage1 (blocks 16-31) needs 2 x 9.0 GiB (weights 7.5 GiB, KV 1.0 GiB, the process 506.5 MiB); coordinator 128.0 MiB. "
        'Lower [kv] bytes, take a smaller dtype or model, let layer workers help (backend = "layers" in a [[stage]])'
    )


def test_a_stage_that_holds_no_page_of_kv_is_refused() -> None:
    error = shortage(needed(conf(Stage(Blocks(0, 29)), Stage(Blocks(30, 31)), kv=MIB)))
    assert error is not None
    assert error.kind == "insufficient_memory"
    assert error.message == (
        "stage0 (blocks 0-29): 1.0 MiB of KV memory hold no page of 16 tokens, which takes 1.9 MiB: "
        "raise [kv] bytes or give it fewer blocks"
    )


def test_a_stage_that_may_take_less_than_it_needs_is_refused() -> None:
    error = shortage(needed(conf(Stage(Blocks(0, 15), memory=8 * GIB), Stage(Blocks(16, 31), memory=9 * GIB))))
    assert error is not None
    assert error.message == (
        "stage0 (blocks 0-15) needs 9.0 GiB (weights 7.5 GiB, KV 1.0 GiB, the process 506.5 MiB); it may take 8.0 GiB: "
        'lower [kv] bytes, take a smaller dtype or model, let layer workers help (backend = "layers" in a [[stage]]), or raise its memory'
    )


LEAST = "needs 2.5 GiB even if layer workers hold blocks 0-31 and their KV (weights 2.0 GiB, the process 506.5 MiB)"


def test_a_stage_that_takes_help_is_told_what_it_needs_even_so_and_is_not_advised_to_take_it() -> None:
    helped = Stage(backend="layers", memory=GIB)
    error = shortage(needed(conf(helped)))
    assert error is not None
    assert error.message == (
        f"stage0 (blocks 0-31) {LEAST}; it may take 1.0 GiB: take a smaller dtype or model, or raise its memory"
    )
    error = shortage(needed(conf(Stage(backend="layers")), GIB))
    assert error is not None
    assert error.message.endswith(f"stage0 (blocks 0-31) {LEAST}; coordinator 128.0 MiB. Take a smaller dtype or model")


def test_a_stage_with_ranks_is_not_advised_to_take_help_that_it_cannot() -> None:
    error = shortage(needed(conf(Stage(memory=GIB, tp=2))))
    assert error is not None
    assert error.message.endswith(": lower [kv] bytes, take a smaller dtype or model, or raise its memory")


def test_every_shortage_is_told() -> None:
    error = shortage(needed(conf(Stage(memory=MIB), Stage(memory=2 * MIB), kv=1000), available=GIB))
    assert error is not None
    assert [line.partition(" ")[0] for line in error.message.split("\n")] == [
        "stage0",
        "stage0",
        "stage1",
        "stage1",
        "the",
    ]


def test_stages_without_a_memory_are_equals() -> None:
    stages = conf(Stage(), Stage(Blocks(3, 9)))
    assert wishes(stages, LLAMA_8B) == [Wish(), Wish(Blocks(3, 9))]


def test_a_stage_with_more_memory_gets_more_blocks() -> None:
    small, large = needed(conf(Stage(memory=6 * GIB), Stage(memory=16 * GIB))).stages
    assert len(small.blocks) * 3 < len(large.blocks)
    shares = [stage.weight_bytes / (stage.memory - GIB - stage.process_bytes) for stage in (small, large)]
    assert shares[0] == pytest.approx(shares[1], rel=0.1)  # both are filled as far


@given(st.lists(st.integers(2, 24), min_size=1, max_size=4), st.integers(1, 2048))
def test_a_plan_fits_where_any_plan_does(memories: list[int], kv_mib: int) -> None:
    stages = conf(*(Stage(memory=size * GIB) for size in memories), kv=kv_mib * MIB)
    found = needed(stages)
    fits = all(stage.total_bytes <= (stage.memory or 0) for stage in found.stages)
    assert fits == _some_cut_fits(stages)


def _some_cut_fits(conf: Conf) -> bool:
    """By filling each stage as far as it goes, in pipeline order: right, since all blocks are
    alike."""
    first, stages = 0, conf.stages
    for number, stage in enumerate(stages):
        room = (stage.memory or 0) - conf.kv.bytes - process_bytes(conf, LLAMA_8B)
        left = len(stages) - number - 1
        last = (
            31
            if not left
            else max(
                (n for n in range(first, 32 - left) if shard_bytes(LLAMA_8B, first, n, BFLOAT16) <= room), default=-1
            )
        )
        if last < first or shard_bytes(LLAMA_8B, first, last, BFLOAT16) > room:
            return False
        first = last + 1
    return True


def test_activations_grow_with_the_chunk() -> None:
    small, large = conf(Stage()), msgspec.structs.replace(conf(Stage()), limits=Limits(chunk=2048))
    width = 3 * 4096 + 3 * 4096 + 2 * 14_336
    assert process_bytes(large, LLAMA_8B) - process_bytes(small, LLAMA_8B) == (2048 - 512) * width * 2


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 19, "2.5 MiB"), (GIB, "1.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert byte_size(count) == words


def test_a_real_process_takes_no_more_than_was_counted(make_model: Callable[..., Path]) -> None:
    """A shard, its KV pool filled by a prompt of the whole context, and the turns of it."""
    folder = make_model(
        "llama",
        hidden_size=512,
        intermediate_size=1536,
        vocab_size=8000,
        max_position_embeddings=2048,
    )
    code = """
import pathlib, re, sys, torch
import zrt.actors.block_server.block_server
from zrt.runtime.compute.cpu.cpu_forward import cpu_decoder
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.compute.turn import BatchStep
from zrt.runtime.compute.weight_sources import open_checkpoint
from zrt.runtime.models.architecture.spec import read_spec
folder = pathlib.Path(sys.argv[1])
spec = read_spec(folder)
cut = (0, 3)
shard = Shard.load(spec, open_checkpoint(folder), cut, dtype=torch.float32)
cache = SlabKVCache(spec, cut, dtype=torch.float32, budget=int(sys.argv[2]), context=1024, sessions=4)
decoder = cpu_decoder(shard, cache)
cache.open("s")
for start in range(0, 1024, 512):
    decoder.forward([BatchStep("s", start, 512)], torch.arange(512) + start)
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    spec = spec_from_config(msgspec.json.decode((folder / "config.json").read_bytes()))
    tokens = 1024
    kv = tokens * 4 * kv_token_bytes(spec, "float32")
    found = needed(conf(Stage(), kv=kv, dtype="float32"), spec=spec).stages[0]
    assert found.kv_tokens == tokens
    done = subprocess.run(
        [sys.executable, "-c", code, folder, str(kv)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    peak = int(done.stdout) * 1024
    assert 0.6 * found.total_bytes < peak <= found.total_bytes


def test_a_stage_that_takes_help_needs_here_what_cannot_be_lent() -> None:
    helped = Stage(Blocks(0, 15), memory=2 * GIB, backend="layers")
    found = needed(conf(helped, Stage(Blocks(16, 31), memory=20 * GIB)))
    alone = needed(conf(Stage(Blocks(0, 15)), Stage(Blocks(16, 31))))
    assert shortage(found) is None
    lent = found.stages[0].lendable_bytes
    assert found.needed_bytes == alone.needed_bytes - lent
    assert 0 < lent < found.stages[0].total_bytes


@pytest.mark.parametrize("join", [False, True], ids=["here", "elsewhere"])
def test_lent_blocks_are_their_workers(join: bool) -> None:
    lent = (
        LendSettings("attic", Blocks(4, 7)),
        LendSettings("cellar", Blocks(10, 11)),
        LendSettings("attic", Blocks(14, 15)),
    )
    workers = (Worker("attic", join=join), Worker("cellar", join=join))
    asked = msgspec.structs.replace(conf(Stage(lend=lent), Stage()), workers=workers)
    found, alone = needed(asked), needed(conf(Stage(), Stage()))
    stage = found.stages[0]
    assert stage.own == "0-3,8-9,12-13"
    assert [(one.worker, one.blocks, one.joins) for one in stage.lent] == [
        ("attic", "4-7,14-15", join),
        ("cellar", "10-11", join),
    ]
    assert stage.kv_bytes + sum(one.kv_bytes for one in stage.lent) == GIB
    assert stage.weight_bytes + sum(one.weight_bytes for one in stage.lent) == alone.stages[0].weight_bytes
    here = 0 if join else sum(one.total_bytes for one in stage.lent)
    assert found.needed_bytes == COORDINATOR_BYTES + stage.total_bytes + here + found.stages[1].total_bytes
    fault = str(shortage(msgspec.structs.replace(found, available_bytes=0)))
    assert ("layer worker attic (blocks 4-7,14-15) needs" in fault) is not join


A_GPU = (12 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("stages", "more", "devices", "says"),
    [
        ([Stage(), Stage()], {}, {}, ""),
        ([Stage(device="cuda:1"), Stage()], {}, {"cuda:1": 1}, ""),
        (
            [Stage(device="cuda:1"), Stage(device="cuda:1")],
            {},
            {"cuda:1": 2},
            "insufficient_vram: cuda:1: 17.0 GiB are needed",
        ),
        ([Stage(device="cuda:1", replicas=2), Stage()], {}, {"cuda:1": 2}, "insufficient_vram: cuda:1: 17"),
        ([Stage(device="cuda:0", tp=2), Stage()], {}, {"cuda:0": 0.5, "cuda:1": 0.5}, ""),
        ([Stage(device="cuda:5"), Stage()], {}, {"cuda:5": 1}, "unsupported: there is no device cuda:5 here"),
        (
            [Stage(), Stage()],
            {"spares": Spares(1, "cuda:5")},
            {"cuda:5": 0},
            "unsupported: there is no device cuda:5 here",
        ),
        ([Stage(), Stage()], {"workers": (Worker("w", device="cuda:5", join=True),)}, {}, ""),
        (
            [Stage(lend=(LendSettings("w", Blocks(0, 7)),)), Stage()],
            {"workers": (Worker("w", device="cuda:1"),)},
            {"cuda:1": 0.44},  # 8 of 16 blocks, without the embedding
            "",
        ),
    ],
)
def test_gpus_have_weights_and_kv(
    stages: list[Stage], more: dict[str, object], devices: dict[str, float], says: str
) -> None:
    """In parts of what a half of the model and its KV take."""

    def memory(device: str) -> tuple[int, int]:
        if device == "cuda:5":
            raise ZrtError("unsupported", "there is no device cuda:5 here: 2 CUDA devices")
        return A_GPU

    asked = msgspec.structs.replace(conf(*stages), **more)
    found = needed(asked)
    half = needed(conf(Stage(), Stage())).stages[0].weight_bytes + GIB
    gpus = gpu_needs(asked, found, memory)
    assert {gpu.device: gpu.needed_bytes / half for gpu in gpus} == pytest.approx(devices, abs=0.01)
    assert str(gpu_shortage(gpus) or "").startswith(says)
    assert bool(gpu_shortage(gpus)) == bool(says)
