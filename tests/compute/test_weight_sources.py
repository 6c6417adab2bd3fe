"""Weights are read by byte range, whole or not at all; random ones are the same however they are
cut."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.broken import CASES, DOWN, EMBEDDING, HEAD, INDEX, SINGLE, broken_copy

from zrt.runtime.compute.decoder.linear import DenseLinear, Linear, PackedLinear
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.compute.weight_sources import CHUNK_BYTES, RandomCheckpoint, open_checkpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.families import FAMILIES
from zrt.runtime.models.architecture.spec import ModelSpec, read_spec
from zrt.runtime.models.checkpoint.formats.dense import BFLOAT16, FLOAT32
from zrt.runtime.models.checkpoint.layout import block_bytes, embedding_bytes, head_bytes, shard_bytes


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """Every tensor a shard holds; one that is held twice appears twice."""
    held = {}
    for index, block in enumerate(shard.blocks, shard.first):
        linears = {"qkv": block.qkv, "o": block.o, "gate_up": block.gate_up, "down": block.down}
        for name, linear in linears.items():
            held[f"{index}.{name}"] = _weight(linear)
            if linear.bias is not None:
                held[f"{index}.{name}.bias"] = linear.bias
        held |= {f"{index}.attention_norm": block.attention_norm, f"{index}.mlp_norm": block.mlp_norm}
        if block.qk_norm is not None:
            held[f"{index}.qk_norm"] = block.qk_norm
    ends = {"final_norm": shard.final_norm}
    ends |= {name: _weight(table) for name, table in (("embedding", shard.embedding), ("head", shard.head)) if table}
    return held | {name: tensor for name, tensor in ends.items() if tensor is not None}


def _weight(linear: Linear) -> torch.Tensor:
    """As it lay in the file."""
    if isinstance(linear, DenseLinear):
        return linear.weight
    assert isinstance(linear, PackedLinear)
    weight = torch.empty(linear.shape)
    linear.rows(torch.arange(len(weight)), weight)
    return weight


def _load(folder: Path, blocks: tuple[int, int] = (0, 3), dtype: torch.dtype = torch.float32, **hooks: Any) -> Shard:
    return Shard.load(read_spec(folder), open_checkpoint(folder), blocks, dtype=dtype, **hooks)


def _nothing(_: int) -> None:
    pass


@pytest.mark.parametrize("files", [1, 3], ids=["one file", "an index of several"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_that_of_the_file_in_the_dtype_asked_for(make_model, files, stored, dtype) -> None:
    folder = make_model("llama", dtype=stored, files=files, attention_bias=True)
    expected = {}
    for file in sorted(folder.glob("*.safetensors")):
        expected |= load_file(file)
    assert len(list(folder.glob("*.safetensors"))) >= files
    held = _tensors(_load(folder, dtype=dtype))
    part = "model.layers.2.self_attn."
    for kind in ("weight", "bias"):
        qkv = torch.cat([expected[f"{part}{name}_proj.{kind}"] for name in "qkv"]).to(dtype)
        assert torch.equal(held["2.qkv" if kind == "weight" else "2.qkv.bias"], qkv)
    assert torch.equal(held["3.down"], expected["model.layers.3.mlp.down_proj.weight"].to(dtype))
    assert torch.equal(held["embedding"], expected["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(held["head"], expected["lm_head.weight"].to(dtype))
    assert {tensor.dtype for tensor in held.values()} == {dtype}


@pytest.mark.parametrize("files", [1, 3], ids=["one file", "an index of several"])
def test_a_checkpoint_lists_its_tensors_and_where_their_bytes_lie(make_model, files) -> None:
    folder = make_model("qwen3", dtype="bfloat16", files=files)
    checkpoint = open_checkpoint(folder)
    expected = {}
    for file in folder.glob("*.safetensors"):
        expected |= load_file(file)
    assert checkpoint.names() == sorted(expected)
    for name, tensor in expected.items():
        entry = checkpoint.entry(name)
        data = entry.file.read_bytes()[entry.begin : entry.begin + entry.nbytes]
        assert (entry.dtype, entry.shape) == ("BF16", tuple(tensor.shape))
        assert data == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 0), (0, 5), (7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("source", ["files", "random"])
def test_any_part_of_a_tensor_can_be_read(make_model, row, column, dtype, strided, source) -> None:
    folder = make_model("llama", dtype="bfloat16")
    spec = read_spec(folder)
    checkpoint = open_checkpoint(folder) if source == "files" else RandomCheckpoint(spec)
    name, shape = "model.layers.1.mlp.up_proj.weight", (96, 64)
    whole = torch.empty(shape, dtype=dtype)
    checkpoint.read(name, shape, whole, _nothing)
    into = torch.full((20, 60), 7.0, dtype=dtype)[:, ::2] if strided else torch.full((20, 30), 7.0, dtype=dtype)
    checkpoint.read(name, shape, into, _nothing, row=row, column=column)
    assert torch.equal(into, whole[row : row + 20, column : column + 30])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("blocks", [(0, 3), (0, 1), (1, 2), (2, 3)])
def test_a_shard_takes_the_bytes_that_were_planned(make_model, family, tied, blocks) -> None:
    folder = make_model(family, tied=tied)
    spec, shard = read_spec(folder), _load(folder, blocks, torch.bfloat16)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(shard).values()
    }
    if spec.qk_norm:  # kept once a head, so that one operation applies them all
        per_head = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        spare = (blocks[1] - blocks[0] + 1) * (per_head - 2 * spec.head_dim) * 2
    else:
        spare = 0
    assert sum(storages.values()) - spare == shard.nbytes == shard_bytes(spec, *blocks, BFLOAT16)
    parts = (blocks[1] - blocks[0] + 1) * block_bytes(spec, BFLOAT16)
    parts += embedding_bytes(spec, BFLOAT16) * (blocks[0] == 0) + head_bytes(spec, BFLOAT16) * (blocks[1] == 3)
    shared = embedding_bytes(spec, BFLOAT16) if tied and blocks == (0, 3) else 0
    assert shard.nbytes == parts - shared


@pytest.mark.parametrize("tied", [False, True])
def test_a_shard_with_the_head_takes_the_tied_embedding_of_another(make_model, tied) -> None:
    folder = make_model("llama", tied=tied, vocab_size=400)
    spec, source = read_spec(folder), open_checkpoint(folder)
    seen = []
    first = Shard.load(spec, source, (0, 1), dtype=torch.float32)
    last = Shard.load(
        spec,
        source,
        (2, 3),
        dtype=torch.float32,
        table=first.embedding,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (last.head is first.embedding) == tied
    own = shard_bytes(spec, 2, 3, FLOAT32) - (embedding_bytes(spec, FLOAT32) if tied else 0)
    assert seen[-1] == (own, own)
    assert last.nbytes == own


def test_tied_ends_in_one_shard_are_one_tensor(make_model) -> None:
    shard = _load(make_model("llama", tied=True))
    assert shard.head is shard.embedding


def test_progress_ends_at_the_whole_in_steps_of_at_most_a_chunk(make_model) -> None:
    folder = make_model("llama", tied=True, vocab_size=70_000, hidden_size=64)
    seen: list[tuple[int, int]] = []
    shard = _load(folder, progress=lambda done, total: seen.append((done, total)))
    steps = [after[0] - before[0] for before, after in zip([(0, 0), *seen], seen, strict=False)]
    assert shard.nbytes > 2 * CHUNK_BYTES
    assert min(steps) > 0
    assert max(steps) <= CHUNK_BYTES
    assert all(total == shard.nbytes for _, total in seen)
    assert seen[-1][0] == shard.nbytes


@pytest.mark.parametrize("source", ["files", "random"])
def test_a_cancelled_load_stops_within_a_chunk(make_model, source) -> None:
    folder = make_model("llama", tied=True, vocab_size=70_000, hidden_size=64)
    spec = read_spec(folder)
    done = [0]

    def progress(bytes_done: int, _: int) -> None:
        done[0] = bytes_done

    checkpoint = open_checkpoint(folder) if source == "files" else RandomCheckpoint(spec)
    with pytest.raises(ZrtError) as caught:
        Shard.load(spec, checkpoint, (0, 3), dtype=torch.float32, progress=progress, cancelled=lambda: done[0] > 0)
    assert caught.value.kind == "cancelled"
    assert 0 < done[0] <= CHUNK_BYTES


@pytest.mark.parametrize("blocks", [(-1, 2), (0, 4), (2, 1)])
def test_blocks_the_model_does_not_have_are_refused(make_model, blocks) -> None:
    with pytest.raises(ZrtError, match="0-3") as caught:
        _load(make_model("llama"), blocks)
    assert caught.value.kind == "bad_config"


def test_a_shard_that_fits_no_memory_is_refused(make_model) -> None:
    spec = replace(read_spec(make_model("llama")), vocab_size=10**12)
    with pytest.raises(ZrtError, match="does not fit in the memory of cpu") as caught:
        Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32)
    assert caught.value.kind == "insufficient_memory"


def test_files_of_other_stages_may_be_absent(make_model, tmp_path) -> None:
    folder = shutil.copytree(make_model("llama", files=3), tmp_path, dirs_exist_ok=True)
    needed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    of_block_0 = {file for name, file in needed.items() if "layers.0." in name or "embed" in name}
    for file in folder.glob("*.safetensors"):
        if file.name not in of_block_0:
            file.unlink()
    assert _load(folder, (0, 0)).nbytes > 0
    with pytest.raises(ZrtError, match=r"cannot read .*No such file"):
        _load(folder, (3, 3))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_broken_checkpoint_is_refused_before_it_is_read_by_the_name_of_what_is_broken(
    make_model, tmp_path, case
) -> None:
    folder = broken_copy(case, make_model, tmp_path)
    read: list[int] = []
    with pytest.raises(ZrtError, match=case.says[0]) as caught:
        _load(folder, progress=lambda done, _: read.append(done))
    assert caught.value.kind == case.kind
    assert not read


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("blocks", [(0, 3), (0, 1), (2, 3)])
def test_a_load_leaves_no_number_as_it_was_allocated(make_model, monkeypatch, family, tied, blocks) -> None:
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.empty(1).isnan()
    shard = _load(make_model(family, tied=tied), blocks)
    assert len(everything := list(_every_tensor(shard))) >= 2 * 6
    assert not any(tensor.isnan().any() for tensor in everything)


def _every_tensor(held: object) -> Iterator[torch.Tensor]:
    """Every tensor reachable from a shard, whatever its fields are called."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, tuple):
        for item in held:
            yield from _every_tensor(item)
    elif not isinstance(held, ModelSpec):
        names = getattr(held, "__dataclass_fields__", None) or getattr(held, "__dict__", {})
        for name in names:
            yield from _every_tensor(getattr(held, name))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8_weights_are_widened(make_model, tmp_path, stored, dtype) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE)
    held = _tensors(_load(folder, dtype=dtype))
    assert torch.equal(held["3.down"], tensors[DOWN].to(dtype))
    assert torch.equal(held["embedding"], tensors[EMBEDDING].to(dtype))
    assert {tensor.dtype for tensor in held.values()} == {dtype}


def test_one_checkpoint_may_mix_dtypes(make_model, tmp_path) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    expected = load_file(folder / SINGLE)
    expected[DOWN] = expected[DOWN].to(torch.float8_e4m3fn)
    expected[HEAD] = expected[HEAD].half()
    save_file(expected, folder / SINGLE)
    held = _tensors(_load(folder))
    assert torch.equal(held["3.down"], expected[DOWN].float())
    assert torch.equal(held["head"], expected[HEAD].float())


@pytest.mark.parametrize("shipped", ["equal", "different", "alone"])
@pytest.mark.parametrize("cuts", [((0, 3),), ((0, 1), (2, 3))], ids=["one stage", "two stages"])
def test_a_tied_head_that_is_shipped_is_used_as_transformers_uses_it(
    make_model, pipeline, reference, tmp_path, shipped, cuts
) -> None:
    folder = shutil.copytree(make_model("llama", tied=True), tmp_path / "model")
    tensors = load_file(folder / SINGLE)
    tensors[HEAD] = tensors[EMBEDDING].clone() if shipped != "different" else tensors[EMBEDDING].flip(0).contiguous()
    if shipped == "alone":
        del tensors[EMBEDDING]
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    prompt = [5, 17, 99, 3, 42]
    wanted = reference(folder).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, 5:].tolist()
    assert pipeline(folder, cuts).greedy("s", prompt, 12) == wanted
    shard = _load(folder)
    assert (shard.head is shard.embedding) == (shipped == "alone")
    assert shard.nbytes == shard_bytes(shard.spec, 0, 3, FLOAT32)


def test_files_that_are_not_the_model_are_ignored(make_model, tmp_path) -> None:
    folder = shutil.copytree(make_model("llama", files=3), tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"no safetensors file")
    (folder / "consolidated.00.pth").write_bytes(b"")
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"of another model")
    assert set(_tensors(_load(folder))) == set(_tensors(_load(make_model("llama"))))


def test_a_single_file_comes_before_an_index(make_model, tmp_path) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    (folder / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert _load(folder).nbytes > 0


@pytest.mark.parametrize("files", [1, 3])
def test_files_may_be_links_to_elsewhere_as_in_a_hub_cache(make_model, tmp_path, files) -> None:
    folder, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(make_model("llama", files=files).iterdir()):
        shutil.copy(file, blobs / str(number))
        (folder / file.name).symlink_to(f"../../blobs/{number}")
    held, wanted = _tensors(_load(folder)), _tensors(_load(make_model("llama", files=files)))
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_random_weights_are_the_same_however_the_model_is_cut(make_model, family) -> None:
    spec = read_spec(make_model(family))
    whole = _tensors(Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32))
    for blocks in ((0, 1), (2, 2), (3, 3)):
        for name, tensor in _tensors(Shard.load(spec, RandomCheckpoint(spec), blocks, dtype=torch.float32)).items():
            assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_random_norms_are_near_1_in_every_family(make_model, family) -> None:
    spec = read_spec(make_model(family, initializer_range=0.05))
    shard = Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32)
    assert float(shard.final_norm.mean()) == pytest.approx(1.0, abs=0.05)


def test_random_weights_have_the_spread_of_the_config_and_norms_near_1(make_model) -> None:
    spec = read_spec(make_model("llama", initializer_range=0.05, vocab_size=20_000, attention_bias=True))
    held = _tensors(Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32))
    assert float(held["embedding"].std()) == pytest.approx(0.05, rel=0.02)
    assert float(held["embedding"].mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(held["2.attention_norm"].mean()) == pytest.approx(1.0, abs=0.05)
    assert float(held["2.attention_norm"].std()) > 0.02
    assert float(held["2.qkv.bias"].std()) > 0.02
    assert not torch.equal(held["0.o"], held["1.o"])


def test_random_weights_are_the_same_in_another_process(make_model) -> None:
    folder = make_model("llama")
    spec = read_spec(folder)
    code = (
        "import sys, pathlib, torch; from zrt.runtime.compute.weight_sources import RandomCheckpoint;"
        "from zrt.runtime.models.architecture.spec import ModelSpec, read_spec; t = torch.empty(96, 64);"
        "RandomCheckpoint(read_spec(pathlib.Path(sys.argv[1]))).read('model.layers.1.mlp.up_proj.weight', (96, 64), t, lambda n: None);"
        "sys.stdout.write(t.numpy().tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, timeout=60)
    here = torch.empty(96, 64)
    RandomCheckpoint(spec).read("model.layers.1.mlp.up_proj.weight", (96, 64), here, _nothing)
    assert bytes.fromhex(other.stdout) == here.numpy().tobytes()
