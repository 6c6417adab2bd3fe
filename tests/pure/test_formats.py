"""Formats of stored weights: the bytes of a matrix and of its parts are those that numpy finds
there."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec, spec_from_config
from zrt.runtime.models.checkpoint.formats.dense import BFLOAT16, DENSE, FLOAT16, FLOAT32
from zrt.runtime.models.checkpoint.formats.registry import FORMATS, format_of, item_bytes
from zrt.runtime.models.checkpoint.formats.weight_format import ByteRuns, Plane, WeightFormat
from zrt.runtime.models.checkpoint.layout import block_bytes, block_name, block_shapes, shard_bytes
from zrt.runtime.models.checkpoint.split import RankPart, part_bytes

NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
BLOCKED = WeightFormat("blocked", (Plane("U8", items=34, columns=32),), vectors=FLOAT32)
"""As ggml's q8_0: 34 bytes for each 32 columns of a row."""
SUPER = WeightFormat("super", (Plane("U8", items=144, columns=256),), vectors=FLOAT32)
"""As ggml's q4_K."""
TILED = WeightFormat(
    "tiled", (Plane("F8_E4M3"), Plane("F32", rows=128, columns=128, suffix="_scale_inv")), vectors=BFLOAT16
)
"""float8 with a float32 scale for each 128 x 128."""
BY_ROW = WeightFormat("by row", (Plane("I8"), Plane("F16", columns=None, suffix="_scale")), vectors=FLOAT16)
"""int8 with a float16 scale for each row."""


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, int], range, range]:
    """A matrix's shape, and the rows and columns of a part of it."""

    def span(size: int) -> range:
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        return range(start, stop)

    shape = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return shape, span(shape[0]), span(shape[1])


def held(runs: ByteRuns, data: bytes) -> bytes:
    return b"".join(data[run.start : run.stop] for run in runs)


@given(parts(), st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]))
def test_the_bytes_of_a_dense_part_are_those_of_the_numpy_slice(part, weights: WeightFormat) -> None:
    shape, rows, columns = part
    size = NUMPY[weights.name]().itemsize
    data = np.random.default_rng(0).integers(0, 256, shape[0] * shape[1] * size, np.uint8)
    matrix = data.view(NUMPY[weights.name]).reshape(shape)
    assert weights.nbytes(shape) == data.nbytes == matrix.nbytes
    (runs,) = weights.runs(shape, rows, columns)
    wanted = matrix[rows.start : rows.stop, columns.start : columns.stop]
    assert held(runs, data.tobytes()) == wanted.tobytes()
    assert runs.total == wanted.nbytes == weights.nbytes((len(rows), len(columns)))
    assert runs.count == (1 if len(columns) == shape[1] else len(rows))


@pytest.mark.parametrize("weights", DENSE.values(), ids=lambda weights: weights.name)
def test_dense_formats_are_cut_anywhere_and_have_one_tensor_of_the_matrix_s_shape(weights: WeightFormat) -> None:
    assert format_of(weights.name) is weights
    assert (weights.row_block, weights.column_block) == (1, 1)
    assert all(weights.can_cut_columns(7, at) and weights.can_cut_rows(7, at) for at in range(8))
    assert not weights.can_cut_columns(7, 8)
    assert not weights.can_cut_rows(7, -1)
    (dtype,) = (name for name, dense in DENSE.items() if dense is weights)
    assert weights.stored((5, 7)) == {"": (dtype, (5, 7))}
    assert weights.stored((5,)) == {"": (dtype, (5,))}
    assert weights.nbytes((5,)) == 5 * item_bytes(weights.name)
    (runs,) = weights.runs((5,), range(2, 5), range(1))
    assert list(runs) == [range(2 * item_bytes(weights.name), 5 * item_bytes(weights.name))]


def test_a_format_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ZrtError, match=r"'int3' is not one of float32, bfloat16, float16") as caught:
        format_of("int3")
    assert caught.value.kind == "unsupported"
    assert set(FORMATS) >= {"float32", "bfloat16", "float16"}


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_packed_blocks_are_cut_between_blocks(rows: int, blocks: int, data: st.DataObject) -> None:
    shape = rows, blocks * 32
    assert BLOCKED.nbytes(shape) == rows * blocks * 34
    assert BLOCKED.stored(shape) == {"": ("U8", (rows, blocks * 34))}
    cells = np.arange(rows * blocks * 34).reshape(rows, blocks, 34)  # each byte's offset
    first, last = sorted((data.draw(st.integers(0, blocks)), data.draw(st.integers(0, blocks))))
    top, bottom = sorted((data.draw(st.integers(0, rows)), data.draw(st.integers(0, rows))))
    (runs,) = BLOCKED.runs(shape, range(top, bottom), range(first * 32, last * 32))
    wanted = cells[top:bottom, first:last].flatten().tolist()
    assert [offset for run in runs for offset in run] == wanted
    assert runs.total == BLOCKED.nbytes((bottom - top, (last - first) * 32))


def test_the_last_block_of_a_row_may_be_short() -> None:
    assert BLOCKED.nbytes((3, 70)) == 3 * 3 * 34
    (runs,) = BLOCKED.runs((3, 70), range(1, 3), range(64, 70))
    assert list(runs) == [range(102 + 68, 204), range(204 + 68, 306)]


@pytest.mark.parametrize(
    ("weights", "shape", "rows", "columns", "words"),
    [
        (BLOCKED, (4, 64), range(4), range(16, 64), "blocked weights [4, 64] cannot be cut at column 16"),
        (BLOCKED, (4, 64), range(4), range(40), "blocked weights [4, 64] cannot be cut at column 40"),
        (BLOCKED, (4, 64), range(4), range(96), "blocked weights [4, 64] cannot be cut at column 96"),
        (SUPER, (4, 512), range(4), range(128), "super weights [4, 512] cannot be cut at column 128"),
        (TILED, (256, 256), range(64), range(256), "tiled weights [256, 256] cannot be cut at row 64"),
        (TILED, (256, 256), range(256), range(64), "tiled weights [256, 256] cannot be cut at column 64"),
        (FLOAT32, (4, 4), range(5), range(4), "float32 weights [4, 4] cannot be cut at row 5"),
    ],
)
def test_a_cut_within_a_block_is_refused_by_name(
    weights: WeightFormat, shape: Sequence[int], rows: range, columns: range, words: str
) -> None:
    with pytest.raises(ZrtError) as caught:
        weights.runs(shape, rows, columns)
    assert caught.value.kind == "unsupported"
    assert caught.value.message.startswith(words)


def test_scales_for_tiles_are_a_plane_of_their_own() -> None:
    shape = 256, 300
    assert TILED.stored(shape) == {"": ("F8_E4M3", (256, 300)), "_scale_inv": ("F32", (2, 3))}
    assert TILED.nbytes(shape) == 256 * 300 + 2 * 3 * 4
    assert (TILED.row_block, TILED.column_block) == (128, 128)
    numbers, scales = TILED.runs(shape, range(128, 256), range(128, 300))
    assert (numbers.first, numbers.nbytes, numbers.count, numbers.stride) == (128 * 300 + 128, 172, 128, 300)
    assert list(scales) == [range(4 * 4, 6 * 4)]


def test_a_scale_for_a_row_goes_with_every_part_of_the_row() -> None:
    shape = 6, 10
    assert BY_ROW.stored(shape) == {"": ("I8", (6, 10)), "_scale": ("F16", (6, 1))}
    assert BY_ROW.nbytes(shape) == 60 + 12
    assert BY_ROW.can_cut_columns(10, 3)
    for columns in (range(3), range(3, 10)):
        numbers, scales = BY_ROW.runs(shape, range(2, 5), columns)
        assert (numbers.total, list(scales)) == (3 * len(columns), [range(4, 10)])
    assert BY_ROW.nbytes((3, 3)) + BY_ROW.nbytes((3, 7)) == BY_ROW.nbytes((3, 10)) + 3 * 2


def test_norms_and_biases_are_stored_in_the_format_of_vectors() -> None:
    assert BLOCKED.nbytes((64,)) == 64 * 4
    assert TILED.stored((64,)) == {"": ("BF16", (64,))}
    (runs,) = BY_ROW.runs((64,), range(1, 3), range(1))
    assert list(runs) == [range(2, 6)]


def model(**sizes: int) -> ModelSpec:
    config = {"model_type": "llama", "vocab_size": 160, "hidden_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
    return spec_from_config(config | sizes)


def stored_parts(spec: ModelSpec, part: RankPart) -> Iterator[tuple[tuple[int, ...], range, range]]:
    for name, shape in block_shapes(spec).items():
        for rows, columns in part.cut(spec, block_name(0, name), shape).stored_parts(shape):
            yield shape, rows, columns


@pytest.mark.parametrize("weights", [FLOAT32, BFLOAT16, BLOCKED])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_plan_by_rank_has_the_bytes_of_the_ranges_that_each_rank_reads(world: int, weights: WeightFormat) -> None:
    spec = model()
    for rank in range(world):
        part = RankPart(rank, world)
        read = sum(runs.total for stored in stored_parts(spec, part) for runs in weights.runs(*stored))
        planned = part_bytes(spec, part, 0, 0, weights, ends=(False, False))
        assert planned == read
        assert part_bytes(spec, part, 0, 1, weights, ends=(False, False)) == 2 * planned
    if world == 1:
        assert planned == block_bytes(spec, weights)
        assert part_bytes(spec, RankPart(), 0, 1, weights) == shard_bytes(spec, 0, 1, weights)


def test_a_plan_that_would_cut_a_block_in_two_is_refused() -> None:
    with pytest.raises(ZrtError, match=r"blocked weights \[256, 176\] cannot be cut at column 44: columns lie in"):
        part_bytes(model(intermediate_size=176), RankPart(0, 4), 0, 1, BLOCKED)
