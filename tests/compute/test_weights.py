"""Weights are read by byte range, whole or not at all; random ones are the same however they are cut."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zrt.runtime.compute.layout import block_bytes, embedding_bytes, head_bytes, shard_bytes
from zrt.runtime.compute.shard import Shard
from zrt.runtime.compute.spec import read_spec
from zrt.runtime.compute.weights import CHUNK_BYTES, RandomCheckpoint, open_checkpoint
from zrt.runtime.errors import ZrtError


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """Every tensor a shard holds; one that is held twice appears twice."""
    held = {}
    for index, block in enumerate(shard.blocks, shard.first):
        linears = {"qkv": block.qkv, "o": block.o, "gate_up": block.gate_up, "down": block.down}
        for name, linear in linears.items():
            held[f"{index}.{name}"] = linear.weight
            if linear.bias is not None:
                held[f"{index}.{name}.bias"] = linear.bias
        held |= {f"{index}.attention_norm": block.attention_norm, f"{index}.mlp_norm": block.mlp_norm}
        if block.qk_norm is not None:
            held[f"{index}.qk_norm"] = block.qk_norm
    ends = {"embedding": shard.embedding, "final_norm": shard.final_norm, "head": shard.head and shard.head.weight}
    return held | {name: tensor for name, tensor in ends.items() if tensor is not None}


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
    assert sum(storages.values()) - spare == shard.nbytes == shard_bytes(spec, *blocks, "bfloat16")
    parts = (blocks[1] - blocks[0] + 1) * block_bytes(spec, "bfloat16")
    parts += embedding_bytes(spec, "bfloat16") * (blocks[0] == 0) + head_bytes(spec, "bfloat16") * (blocks[1] == 3)
    shared = embedding_bytes(spec, "bfloat16") if tied and blocks == (0, 3) else 0
    assert shard.nbytes == parts - shared


def test_tied_ends_in_one_shard_are_one_tensor(make_model) -> None:
    shard = _load(make_model("llama", tied=True))
    assert shard.head.weight is shard.embedding


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
    folder = _copy(make_model("llama", files=3), tmp_path)
    needed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    of_block_0 = {file for name, file in needed.items() if "layers.0." in name or "embed" in name}
    for file in folder.glob("*.safetensors"):
        if file.name not in of_block_0:
            file.unlink()
    assert _load(folder, (0, 0)).nbytes > 0
    with pytest.raises(ZrtError, match=r"cannot read .*No such file"):
        _load(folder, (3, 3))


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def _edit(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Save the tensors again after a change to them."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def _cut(fraction: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * fraction)])

    return apply


def _header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)

    return apply


def _entry(**fields: object) -> Callable[[Path], None]:
    """A file whose header says this of one tensor, with 64 bytes of data."""

    def apply(folder: Path) -> None:
        entry = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]} | fields
        text = json.dumps({"model.norm.weight": entry}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(256))

    return apply


def _index(weight_map: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


NORM = "model.layers.2.input_layernorm.weight"
DOWN = "model.layers.3.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds no weights: neither model.safetensors",
    ),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
    "seven bytes": (
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(7)),
        "not a whole safetensors file",
    ),
    "cut in the header": (_cut(0.001), "not a whole safetensors file"),
    "cut in the data": (
        _cut(0.5),
        r"tensor .* in .*model.safetensors ends at byte \d+, but the file has \d+: it is cut off",
    ),
    "the last byte cut": (_cut(0.999999), "it is cut off"),
    "a header of 2^63 bytes": (_header(b"{}", 1 << 63), "not a whole safetensors file"),
    "a header that is not JSON": (_header(b"{'a'}"), "not a JSON object"),
    "a header that is not UTF-8": (_header(b'{"\xff": 1}'), "not a JSON object"),
    "a header that is a list": (_header(b"[]"), "not a JSON object"),
    "a header too deep": (_header(b"[" * 100_000), "not a JSON object"),
    "an empty header": (_header(b"{}"), "tensor model.embed_tokens.weight is missing"),
    "an entry that is no object": (_header(b'{"a": 3}'), "tensor a in .* its header entry is damaged"),
    "an entry without offsets": (_entry(data_offsets=None), "its header entry is damaged"),
    "an entry that ends before it begins": (_entry(data_offsets=[8, 4]), "bytes 8 to 4 do not hold F32"),
    "an entry with a negative size": (
        _entry(shape=[-64], data_offsets=[0, 256]),
        "its header entry is damaged",
    ),
    "an entry with a size that is text": (_entry(shape=["64"]), "its header entry is damaged"),
    "an entry whose bytes do not hold its shape": (_entry(shape=[65]), r"bytes 0 to 256 do not hold F32 \[65\]"),
    "an entry beyond the file": (_entry(shape=[128], data_offsets=[0, 512]), "model.norm.weight .* it is cut off"),
    "a tensor missing": (_edit(lambda tensors: tensors.pop(NORM)), f"tensor {NORM} is missing"),
    "a tensor transposed": (
        _edit(lambda tensors: tensors.update({DOWN: tensors[DOWN].t().contiguous()})),
        rf"tensor {DOWN} in .*model.safetensors is \[96, 64\], not \[64, 96\]",
    ),
    "a tensor of integers": (
        _edit(lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int32)})),
        f"tensor {NORM} in .* is I32, not F32, BF16, F16",
    ),
    "a tensor of doubles": (_edit(lambda tensors: tensors.update({NORM: torch.ones(64).double()})), "is F64, not F32"),
    "an index that is no map": (_index([1, 2]), "index.json is damaged"),
    "an index to a file elsewhere": (_index({NORM: "../other.safetensors"}), "not the name of a file beside it"),
    "an index to a number": (_index({NORM: 3}), "index.json is damaged"),
    "an index to a missing file": (
        _index({"model.embed_tokens.weight": "gone.safetensors"}),
        "gone.safetensors: No such file",
    ),
    "an index that is not JSON": (
        lambda folder: (_index({})(folder), (folder / "model.safetensors.index.json").write_text("{"))[0],
        "index.json is damaged",
    ),
}


@pytest.mark.parametrize(("break_it", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_refused_before_it_is_read_by_the_name_of_what_is_broken(
    make_model, tmp_path, break_it, text
) -> None:
    folder = _copy(make_model("llama"), tmp_path)
    break_it(folder)
    read: list[int] = []
    with pytest.raises(ZrtError, match=text) as caught:
        _load(folder, progress=lambda done, _: read.append(done))
    assert caught.value.kind == "bad_model"
    assert not read


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(make_model, tmp_path) -> None:
    folder = _copy(make_model("llama", files=3), tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])
    path.write_text(json.dumps(index))
    with pytest.raises(
        ZrtError, match=rf"tensor {NORM} is missing from .*, where model.safetensors.index.json says it is"
    ):
        _load(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_random_weights_are_the_same_however_the_model_is_cut(make_model, family) -> None:
    spec = read_spec(make_model(family))
    whole = _tensors(Shard.load(spec, RandomCheckpoint(spec), (0, 3), dtype=torch.float32))
    for blocks in ((0, 1), (2, 2), (3, 3)):
        for name, tensor in _tensors(Shard.load(spec, RandomCheckpoint(spec), blocks, dtype=torch.float32)).items():
            assert torch.equal(tensor, whole[name]), name


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
        "import sys, pathlib, torch; from zrt.runtime.compute.weights import RandomCheckpoint;"
        "from zrt.runtime.compute.spec import read_spec; t = torch.empty(96, 64);"
        "RandomCheckpoint(read_spec(pathlib.Path(sys.argv[1]))).read('model.layers.1.mlp.up_proj.weight', (96, 64), t, lambda n: None);"
        "sys.stdout.write(t.numpy().tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, timeout=60)
    here = torch.empty(96, 64)
    RandomCheckpoint(spec).read("model.layers.1.mlp.up_proj.weight", (96, 64), here, _nothing)
    assert bytes.fromhex(other.stdout) == here.numpy().tobytes()
