"""The description of a stored matrix: one or several planes of cells, and the bytes that a part of
the matrix takes in each. Pure arithmetic.

A plane covers the matrix with equal cells of a fixed number of bytes, row after row of cells. Dense
weights are one plane of cells of one number. Packed blocks (34 bytes for each 32 columns of a row)
are one plane of wider cells; numbers with scales beside them are two planes: a cell of the scales'
plane is as large as the part of the matrix that one scale applies to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.checkpoint.safetensors import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Byte ranges of one length at equal distances: `count` runs of `nbytes` bytes each, the first
    at offset `first`, each following run `stride` bytes further on."""

    first: int
    nbytes: int
    count: int
    stride: int

    def __iter__(self) -> Iterator[range]:
        """Yield the byte range of each run, ascending."""
        for number in range(self.count):
            begin = self.first + number * self.stride
            yield range(begin, begin + self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all runs together."""
        return self.nbytes * self.count


@dataclass(frozen=True, slots=True)
class Plane:
    """Cells of `items` numbers of the safetensors dtype `dtype`, each for `rows` x `columns` of the
    matrix; None: for all rows, or all columns, that there are.

    Cells at the right and the lower edge are stored whole, however little of the matrix they cover.
    `suffix` is what the name of the plane's tensor has after the name of the matrix.
    """

    dtype: str
    items: int = 1
    rows: int | None = 1
    columns: int | None = 1
    suffix: str = ""

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return self.items * ITEM_BYTES[self.dtype]

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many cells a matrix [rows, columns] has, down and across."""
        return _cells(shape[0], self.rows), _cells(shape[1], self.columns)

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the tensor, in numbers of `dtype`, that stores a matrix [rows,
        columns]."""
        down, across = self.grid(shape)
        return down, across * self.items

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a whole matrix [rows, columns]."""
        return prod(self.grid(shape)) * self.cell_bytes

    def runs(self, shape: tuple[int, int], rows: range, columns: range) -> ByteRuns:
        """Return the bytes, counted from the plane's first byte, that hold these rows and columns
        of a matrix of this shape, in as few runs as possible."""
        down, across = _cells_of(rows, self.rows), _cells_of(columns, self.columns)
        row_bytes, nbytes = self.grid(shape)[1] * self.cell_bytes, len(across) * self.cell_bytes
        first = down.start * row_bytes + across.start * self.cell_bytes
        if nbytes == row_bytes:
            return ByteRuns(first, len(down) * row_bytes, 1, len(down) * row_bytes)
        return ByteRuns(first, nbytes, len(down), row_bytes)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store matrices, with its name. Tensors of one dimension (norms, biases) are stored
    in the format `vectors`; None: in this format, as a matrix of one column."""

    name: str
    planes: tuple[Plane, ...]
    vectors: "WeightFormat | None" = None

    @property
    def row_block(self) -> int:
        """Number of rows that can only be held together; 1 for dense weights."""
        return lcm(*(plane.rows or 1 for plane in self.planes))

    @property
    def column_block(self) -> int:
        """Number of columns that can only be held together; 1 for dense weights."""
        return lcm(*(plane.columns or 1 for plane in self.planes))

    def of(self, shape: Sequence[int]) -> "WeightFormat":
        """Return the format in which a tensor of this shape, of one or two dimensions, is
        stored."""
        return self if len(shape) == 2 or self.vectors is None else self.vectors

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that a tensor of this shape, of one or two dimensions, takes."""
        matrix = matrix_shape(shape)
        return sum(plane.nbytes(matrix) for plane in self.of(shape).planes)

    def stored(self, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and the shape of each tensor that stores a tensor of this shape, by its
        suffix."""
        matrix = matrix_shape(shape)
        return {plane.suffix: (plane.dtype, plane.shape(matrix)[: len(shape)]) for plane in self.of(shape).planes}

    def can_cut_rows(self, rows: int, at: int) -> bool:
        """Return whether a matrix of `rows` rows can be stored as the rows before `at` and the
        others."""
        return at in (0, rows) or (0 < at < rows and at % self.row_block == 0)

    def can_cut_columns(self, columns: int, at: int) -> bool:
        """Return whether a matrix of `columns` columns can be stored as the columns before `at` and
        the others."""
        return at in (0, columns) or (0 < at < columns and at % self.column_block == 0)

    def runs(self, shape: Sequence[int], rows: range, columns: range) -> tuple[ByteRuns, ...]:
        """Return the bytes of each plane that hold these rows and columns (steps of 1) of a tensor
        of this shape, counted from the plane's first byte.

        ZrtError unsupported, with the name of the format: the tensor cannot be cut there.
        """
        own, matrix = self.of(shape), matrix_shape(shape)
        own.check_cut(shape, rows, columns)
        return tuple(plane.runs(matrix, rows, columns) for plane in own.planes)

    def check_cut(self, shape: Sequence[int], rows: range, columns: range) -> None:
        """Raise ZrtError unsupported, with the name of the format, unless these rows and columns of
        a tensor of this shape can be held by themselves."""
        own, (height, width) = self.of(shape), matrix_shape(shape)
        for what, size, block, can, span in (
            ("row", height, own.row_block, own.can_cut_rows, rows),
            ("column", width, own.column_block, own.can_cut_columns, columns),
        ):
            for at in (span.start, span.stop):
                if not can(size, at):
                    raise ZrtError(
                        "unsupported",
                        f"{own.name} weights {list(shape)} cannot be cut at {what} {at}: {what}s lie in blocks of {block}",
                    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return [rows, columns] of a tensor's shape; a tensor of one dimension is a column."""
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)


def _cells(size: int, cell: int | None) -> int:
    """Return how many cells cover `size` rows or columns."""
    return min(size, 1) if cell is None else -(-size // cell)


def _cells_of(span: range, cell: int | None) -> range:
    """Return the cells that cover the rows or columns of `span`."""
    if cell is None:
        return range(min(len(span), 1))
    return range(span.start // cell, -(-span.stop // cell))
