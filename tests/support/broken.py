"""Model folders as people find them: every way a checkpoint can be broken, made by code, and the
report on each."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.2.input_layernorm.weight"
DOWN = "model.layers.3.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Break = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One way to break a model: `breaks` breaks a copy of a tiny llama in `files` files; every
    pattern of `says` is then found in a problem of its own."""

    breaks: Break
    says: tuple[str, ...]
    files: int = 1
    kind: str = "bad_model"


def broken_copy(case: Case, make_model: Callable[..., Path], to: Path) -> Path:
    """Make a copy of a model, broken as the case says, and return its folder."""
    copy = shutil.copytree(make_model("llama", files=case.files), to / "model")
    case.breaks(copy)
    return copy


def edit(change: Callable[[dict[str, torch.Tensor]], Any], file: str = SINGLE) -> Break:
    """Return a break that saves the tensors of a file again after a change to them."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return apply


def read_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def reindex(change: Callable[[dict[str, str]], Any]) -> Break:
    """Return a break that writes the index again after a change to its map."""

    def apply(folder: Path) -> None:
        weight_map = read_index(folder)
        change(weight_map)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def raw(text: bytes, length: int | None = None, data: int = 0) -> Break:
    """Return a break that writes a file with this header, which claims `length` bytes, and `data`
    zero bytes after it."""

    def apply(folder: Path) -> None:
        size = struct.pack("<Q", len(text) if length is None else length)
        (folder / SINGLE).write_bytes(size + text + bytes(data))

    return apply


def entries(**entries: tuple[str, list[Any], list[Any]]) -> Break:
    """Return a break that writes a file with a header of these (dtype, shape, offsets) and 256
    bytes of data."""
    header = {name: {"dtype": entry[0], "shape": entry[1], "data_offsets": entry[2]} for name, entry in entries.items()}
    return raw(json.dumps(header).encode(), data=256)


def indexed(text: str) -> Break:
    """Return a break that replaces the single file with this index."""

    def apply(folder: Path) -> None:
        (folder / SINGLE).unlink()
        (folder / INDEX).write_text(text)

    return apply


def maps(weight_map: object) -> Break:
    return indexed(json.dumps({"weight_map": weight_map}))


def cut(fraction: float) -> Break:
    def apply(folder: Path) -> None:
        size = (folder / SINGLE).stat().st_size
        os.truncate(folder / SINGLE, int(size * fraction))

    return apply


def extended(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(bytes(10))


def renamed(name: str) -> Break:
    def apply(folder: Path) -> None:
        (folder / SINGLE).rename(folder / name)

    return apply


def instead(make: Callable[[Path], Any]) -> Break:
    """Return a break that replaces the single file with what `make` creates."""

    def apply(folder: Path) -> None:
        (folder / SINGLE).unlink()
        make(folder / SINGLE)

    return apply


def second_file(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def moved(folder: Path) -> None:
    """Move a tensor to the third file, while the index says the second."""
    file = folder / read_index(folder)[NORM]
    other = next(path for path in sorted(folder.glob("model-*")) if path not in (file, folder / INDEX))
    tensors = load_file(file)
    tensor = tensors.pop(NORM)
    save_file(tensors, file)
    edit(lambda there: there.update({NORM: tensor}), other.name)(folder)


def doubled(folder: Path) -> None:
    """Store a tensor in two files."""
    file = read_index(folder)[NORM]
    other = next(path.name for path in sorted(folder.glob("model-*.safetensors")) if path.name != file)
    edit(lambda there: there.update({NORM: load_file(folder / file)[NORM]}), other)(folder)


def both(*breaks: Callable[[Path], object]) -> Break:
    def apply(folder: Path) -> None:
        for each in breaks:
            each(folder)

    return apply


NOT_WHOLE = r"model\.safetensors is not a whole safetensors file: its \d+ bytes cannot hold a header"
DAMAGED = r"model\.safetensors is damaged: its header is not a JSON object"
DOWN_PROJ = DOWN.removesuffix(".weight")

CASES: dict[str, Case] = {
    # no weights
    "nothing": Case(
        instead(lambda path: None), ("holds no weights: neither model.safetensors nor model.safetensors.index",)
    ),
    "another format": Case(
        renamed("pytorch_model.bin"), (r"holds no weights.* \(there is pytorch_model\.bin, which zrt does not",)
    ),
    "a stray consolidated file alone": Case(
        renamed("consolidated.safetensors"), ("there is consolidated.safetensors, which zrt",)
    ),
    "shards without their index": Case(
        lambda folder: (folder / INDEX).unlink(), (r"there is model-00001-of-\d+\.safetensors and \d more",), files=3
    ),
    # files that are no safetensors files
    "an empty file": Case(instead(lambda path: path.touch()), (NOT_WHOLE,)),
    "seven bytes": Case(instead(lambda path: path.write_bytes(bytes(7))), (NOT_WHOLE,)),
    "cut in the header": Case(cut(0.001), (NOT_WHOLE,)),
    "a header larger than the file": Case(raw(b"{}", 1 << 63), (rf"{NOT_WHOLE} of {1 << 63} bytes",)),
    "a Git LFS pointer": Case(
        instead(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")),
        ("is a pointer of Git LFS and not the file itself",),
    ),
    "a header that is not JSON": Case(raw(b"{'a'}"), (DAMAGED,)),
    "a header that is not UTF-8": Case(raw(b'{"\xff": 1}'), (DAMAGED,)),
    "a header that is a list": Case(raw(b"[]"), (DAMAGED,)),
    "a header too deep": Case(raw(b"[" * 100_000), (DAMAGED,)),
    "a header with a number JSON lacks": Case(raw(b'{"a": NaN}'), (rf"{DAMAGED} \(NaN",)),
    "a folder": Case(instead(lambda path: path.mkdir()), ("model.safetensors: it is not a regular file",)),
    "a pipe": Case(
        both(
            instead(os.mkfifo),
            lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: SINGLE}})),
        ),
        ("model.safetensors: it is not a regular file",),
    ),
    "a link to nothing": Case(
        instead(lambda path: path.symlink_to("../../blobs/0123")),
        (r"cannot read .*model\.safetensors \(a link to \.\./\.\./blobs/0123\): No such file",),
    ),
    # headers that are wrong
    "a header without a tensor": Case(raw(b"{}"), (rf"tensor {EMBEDDING} is missing from the checkpoint in",)),
    "an entry that is no object": Case(
        raw(b'{"a": 3}'), (r"tensor a in .*model\.safetensors: its header entry is damaged",)
    ),
    "an entry without offsets": Case(
        raw(b'{"a": {"dtype": "F32", "shape": [1]}}'), ("tensor a in .*: its header entry is damaged",)
    ),
    "an entry with a negative size": Case(
        entries(a=("F32", [-64], [0, 256])), ("tensor a in .*: its header entry is damaged",)
    ),
    "an entry with a size that is text": Case(
        entries(a=("F32", ["64"], [0, 256])), ("tensor a in .*: its header entry is damaged",)
    ),
    "an entry with a negative offset": Case(
        entries(a=("F32", [64], [-256, 0])), ("tensor a in .*: its header entry is damaged",)
    ),
    "an entry that ends before it begins": Case(
        entries(a=("F32", [64], [8, 4])), (r"tensor a in .*: bytes 8 to 4 do not hold F32 \[64\]",)
    ),
    "an entry whose bytes do not hold its shape": Case(
        entries(a=("F32", [65], [0, 256])), (r"tensor a in .*: bytes 0 to 256 do not hold F32 \[65\]",)
    ),
    "an entry that overflows": Case(
        entries(a=("F32", [1 << 62, 1 << 62], [0, 256])), (r"tensor a in .*: bytes 0 to 256 do not hold F32",)
    ),
    "a name that no terminal should see": Case(
        raw(json.dumps({"a\x1b[2J": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode(), data=1),
        (r"tensor 'a\\x1b\[2J' in .*: its name cannot be printed",),
    ),
    "a name twice": Case(
        raw(
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
            data=1,
        ),
        (r"model\.safetensors is damaged: its header names 'a' twice",),
    ),
    "an entry beyond the file": Case(
        entries(a=("F32", [128], [0, 512])),
        (
            r"model\.safetensors is cut off: it has \d+ bytes, its header says \d+; 1 of its 1 tensors are not whole, such as a",
        ),
    ),
    "entries that overlap": Case(
        entries(a=("F32", [40], [0, 160]), b=("F32", [32], [128, 256])),
        (r"tensor b in .*model\.safetensors overlaps tensor a: it begins 32 bytes before its end",),
    ),
    "entries that lie in one another": Case(
        entries(a=("F32", [64], [0, 256]), b=("F32", [2], [8, 16]), c=("F32", [2], [16, 24])),
        ("tensor b in .* overlaps tensor a: it begins 248", "tensor c in .* overlaps tensor a: it begins 240"),
    ),
    "a hole between entries": Case(
        entries(a=("F32", [16], [0, 64]), b=("F32", [16], [192, 256])),
        (r"model\.safetensors is damaged: 128 bytes before tensor b belong to no tensor",),
    ),
    # data that is not there
    "cut in the data": Case(
        cut(0.5), (r"is cut off: it has \d+ bytes, its header says \d+; \d\d of its 39 tensors are not",)
    ),
    "the last byte cut": Case(cut(0.999999), (r"is cut off: .*; 1 of its 39 tensors are not whole",)),
    "bytes at the end": Case(extended, (r"model\.safetensors is damaged: 10 bytes at its end belong to no tensor",)),
    # tensors that are wrong
    "a tensor missing": Case(
        edit(lambda tensors: tensors.pop(NORM)), (rf"tensor {NORM} is missing from the checkpoint in",)
    ),
    "a tensor transposed": Case(
        edit(lambda tensors: tensors.update({DOWN: tensors[DOWN].t().contiguous()})),
        (rf"tensor {DOWN} in .*model\.safetensors is \[96, 64\], not \[64, 96\]",),
    ),
    "a tensor of no numbers": Case(
        edit(lambda tensors: tensors.update({NORM: torch.empty(0)})), (rf"tensor {NORM} in .* is \[0\], not \[64\]",)
    ),
    "a tensor of integers": Case(
        edit(lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int32)})),
        (rf"tensor {NORM} in .* is I32, not F32, BF16, F16, F8_E4M3, F8_E5M2",),
    ),
    "a tensor of doubles": Case(
        edit(lambda tensors: tensors.update({NORM: torch.ones(64).double()})),
        (rf"tensor {NORM} in .* is F64, not F32",),
    ),
    "fp8 with a scale": Case(
        edit(
            lambda tensors: tensors.update(
                {DOWN: tensors[DOWN].to(torch.float8_e4m3fn), f"{DOWN_PROJ}.weight_scale_inv": torch.ones(1, 1)}
            )
        ),
        (rf"tensor {DOWN} is quantised \(weight_scale_inv is stored with it\)",),
        kind="unsupported",
    ),
    "packed integers": Case(
        edit(lambda tensors: tensors.update({f"{DOWN_PROJ}.qweight": tensors.pop(DOWN).int()})),
        (rf"tensor {DOWN} is quantised \(qweight is stored with it\)",),
        kind="unsupported",
    ),
    "an absmax beside packed bytes": Case(
        edit(lambda tensors: tensors.update({DOWN: torch.ones(3072, 1).byte(), f"{DOWN}.absmax": torch.ones(96)})),
        (rf"tensor {DOWN} is quantised \(absmax is stored with it\)",),
        kind="unsupported",
    ),
    # an index that is wrong
    "an index that is not JSON": Case(indexed("{"), (r"index\.json is damaged",)),
    "an index without a map": Case(indexed("{}"), (r"index\.json is damaged",)),
    "an index that is no map": Case(maps([1, 2]), (r"index\.json is damaged",)),
    "an index to a number": Case(maps({NORM: 3}), (r"index\.json is damaged",)),
    "an index that names a tensor twice": Case(
        indexed('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}'),
        (r"index\.json is damaged: it names 'a' twice",),
    ),
    "an index to a file elsewhere": Case(
        maps({NORM: "../other.safetensors"}),
        (rf"weight_map\.{NORM} is '\.\./other\.safetensors', not the name of a file beside it",),
    ),
    "an index to the folder": Case(maps({NORM: "."}), (r"is '\.', not the name of a file beside it",)),
    "an index to the folder above": Case(maps({NORM: ".."}), (r"is '\.\.', not the name of a file beside it",)),
    "an index to no name": Case(maps({NORM: ""}), ("is '', not the name of a file beside it",)),
    "an index to any file": Case(maps({NORM: "/etc/passwd"}), ("is '/etc/passwd', not the name of a file beside it",)),
    "an index to an impossible name": Case(maps({NORM: "a\0b"}), (r"is 'a\\x00b', not the name of a file beside it",)),
    # several files
    "a file missing": Case(
        lambda folder: second_file(folder).unlink(),
        (r"cannot read .*model-00002-of-0000\d\.safetensors: No such file",),
        files=3,
    ),
    "a file cut off": Case(
        lambda folder: os.truncate(second_file(folder), 100),
        (r"model-00002-of-0000\d\.safetensors is not a whole safetensors file: its 100 bytes",),
        files=3,
    ),
    "an index that lacks a tensor": Case(
        reindex(lambda weight_map: weight_map.pop(NORM)),
        (rf"tensor {NORM} is not in model\.safetensors\.index\.json; it is in .*model-0000\d-of",),
        files=3,
    ),
    "a tensor in another file than the index says": Case(
        moved,
        (
            rf"tensor {NORM} is missing from .*model-0000\d-.*, where model\.safetensors\.index\.json says it is; it is in .*model",
        ),
        files=3,
    ),
    "an index that names an absent tensor": Case(
        lambda folder: edit(lambda tensors: tensors.pop(NORM), read_index(folder)[NORM])(folder),
        (rf"tensor {NORM} is missing from .*model-0000\d-.*, where model\.safetensors\.index\.json says it is$",),
        files=3,
    ),
}

ONLY_SURVEYED: dict[str, Case] = {
    "a tensor in two files": Case(
        doubled,
        (rf"tensor {NORM} is in .*, where model\.safetensors\.index\.json says it is, but also in .*model-0000\d",),
        files=3,
    ),
    "several problems at once": Case(
        both(
            edit(lambda tensors: [tensors.pop(f"model.layers.{block}.mlp.up_proj.weight") for block in (0, 1, 3)]),
            edit(lambda tensors: tensors.pop("model.norm.weight")),
            edit(lambda tensors: tensors.update({HEAD: torch.ones(160, 32)})),
        ),
        (
            r"tensor model\.layers\.\{0-1,3\}\.mlp\.up_proj\.weight is missing",
            r"tensor model\.norm\.weight is missing",
            r"tensor lm_head\.weight in .* is \[160, 32\], not \[160, 64\]",
        ),
    ),
    "several broken files": Case(
        both(
            lambda folder: second_file(folder).unlink(),
            lambda folder: os.truncate(sorted(folder.glob("model-*.safetensors"))[0], 100),
        ),
        (r"model-00001-of-0000\d\.safetensors is not a whole", r"cannot read .*model-00002-of"),
        files=3,
    ),
}
"""Cases that reading every file's header shows, and loading some of the files may not."""
