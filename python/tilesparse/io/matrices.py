"""Single matrices: files of `scipy.sparse.save_npz` and Matrix Market, read without their zeros."""

from __future__ import annotations

import gzip
import io
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from .._checks import BLOCK_SIDES
from .._files import opened, sentence
from ..errors import CheckpointError, UnsupportedError

_SIDE = 1 << 27  # of rows or columns, for each of which a few bytes are held
_EXACT = 1 << 53  # magnitude from which float64 does not have all integers
_LINE = 1 << 16  # characters of the longest line
_LINES = 1 << 16  # in memory at a time


class Matrix(NamedTuple):
    """A matrix of a file.

    Attributes:
        format: as its library calls it.
        entries: a ``scipy.sparse.csr_array`` of float64 or float32: sorted, duplicates summed, without zeros.
        block_shape: that of the file, if it is BSR in blocks that a pattern may have; None otherwise.
    """

    format: str
    entries: Any
    block_shape: tuple[int, int] | None


def is_matrix(path: Path) -> bool:
    """Return True for a file that `read_matrix` reads, by its name."""
    return path.name.endswith((".npz", ".mtx", ".mtx.gz"))


def read_matrix(path: Path) -> Matrix:
    """Read a matrix, of whose file a part at a time is in memory beside its entries."""
    try:
        import scipy.sparse
    except ImportError as error:
        raise UnsupportedError("scipy is needed to read a matrix: pip install scipy") from error
    try:
        with opened(path) as stream, warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # of "1.5" as an integer in NumPy < 2.3
            if path.suffix == ".npz":
                _check_indices(stream)
                matrix = scipy.sparse.load_npz(stream)
                return _checked(f"scipy {matrix.format.upper()}", matrix)
            data: Any = gzip.GzipFile(fileobj=stream) if path.suffix == ".gz" else stream
            with io.TextIOWrapper(data, encoding="ascii", errors="surrogateescape") as text:
                return _checked("Matrix Market", _read_matrix_market(_Lines(text)))
    except UnsupportedError as error:
        raise UnsupportedError(f"{path.name}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path.name}: cannot be read: {sentence(error)}") from error


def _check_indices(stream: BinaryIO) -> None:
    """Refuse indices that are no integers, which scipy makes some of."""
    import numpy as np

    with np.load(stream) as arrays:
        for name in sorted(
            {"shape", "indptr", "indices", "row", "col", "coords", "offsets"} & {*arrays.files}
        ):
            if arrays[name].dtype.kind not in "iu":
                raise ValueError(f"{name} must be integers, got {arrays[name].dtype}")
    stream.seek(0)


def _checked(format: str, matrix: Any) -> Matrix:
    """Return a scipy matrix in one form, after all checks of its arrays."""
    import numpy as np

    size, kind = " x ".join(map(str, matrix.shape)), matrix.dtype.kind
    if matrix.ndim != 2 or kind not in "fiub" or matrix.dtype.itemsize > 8:
        raise ValueError(
            f"it must be a matrix of real numbers of at most 64 bits, got {size} of {matrix.dtype}"
        )
    if not all(matrix.shape):
        raise ValueError(f"it must have rows and columns, got {size}")
    if max(matrix.shape) > _SIDE:
        raise UnsupportedError(f"it must have at most {_SIDE} rows and columns, got {size}")
    if matrix.format in ("bsr", "csc", "csr"):
        matrix.check_format(full_check=True)
    _check_exact(kind, matrix.data)
    sides = matrix.blocksize if matrix.format == "bsr" else (0, 0)
    block_shape = (int(sides[0]), int(sides[1])) if {*sides} <= {*BLOCK_SIDES} else None
    dtype = np.float32 if kind == "f" and matrix.dtype.itemsize <= 4 else np.float64
    if kind != "b":  # whose duplicates make True
        matrix = matrix.astype(dtype, copy=False)
    entries = matrix.tocsr()
    entries.sum_duplicates()
    entries.eliminate_zeros()
    _check_exact(kind, entries.data)
    return Matrix(format, entries.astype(dtype, copy=False), block_shape)


def _check_exact(kind: str, values: Any) -> None:
    if kind in "iu" and values.size and not -_EXACT < values.min() <= values.max() < _EXACT:
        raise ValueError("integers must be below 2^53, which float64 has exactly")


class _Lines:
    """Lines of a text, of which a part is in memory."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._number = 0
        self._taken: list[tuple[int, str]] = []  # last, with their numbers

    def header(self) -> str:
        """Return the first line."""
        self._taken = [(1, self._next())]
        return self._taken[0][1]

    def take(self, count: int) -> list[str]:
        """Return at most so many lines that are neither blank nor comments."""
        self._taken = []
        while len(self._taken) < count and (line := self._next()):
            if line[0] != "%" and not line.isspace():
                self._taken.append((self._number, line))
        return self.taken()

    def parse(self, dtype: Any, wanted: str, count: int) -> Any:
        """Return at most so many lines as records."""
        import numpy as np

        lines = self.take(count)
        try:
            return np.loadtxt(lines, dtype, comments=None, ndmin=1) if lines else np.empty(0, dtype)
        except (ValueError, DeprecationWarning):  # the latter of "1.5" as an integer in NumPy < 2.3
            for place, line in enumerate(lines):
                try:
                    np.loadtxt([line], dtype, comments=None, ndmin=1)
                except (ValueError, DeprecationWarning):
                    raise self.wrong(place, wanted) from None
            raise

    def check(self, right: Any, wanted: str) -> None:
        """Raise the error on the first of the lines taken last for which an array of bools is False."""
        if not right.all():
            raise self.wrong(int(right.argmin()), wanted)

    def taken(self) -> list[str]:
        """Return the lines taken last."""
        return [line for _, line in self._taken]

    def wrong(self, place: int, wanted: str) -> ValueError:
        """Return the error on one of the lines taken last."""
        number, line = self._taken[place]
        return ValueError(f"line {number} must have {wanted}, got {line.strip()[:60]!a}")

    def _next(self) -> str:
        line = self._stream.readline(_LINE)
        self._number += 1
        if len(line) == _LINE:
            raise ValueError(f"line {self._number} must have fewer than {_LINE} characters")
        return line


_WORDS = (
    ("%%matrixmarket",),
    ("matrix",),
    ("coordinate", "array"),
    ("real", "double", "integer", "unsigned-integer", "pattern"),
    ("general", "symmetric", "skew-symmetric", "hermitian"),
)


class _Header(NamedTuple):
    """The lines above the entries; `has_places` is False for an array, of all columns in turn."""

    has_places: bool
    field: str
    symmetry: str
    shape: tuple[int, int]
    entries: int


def _read_header(lines: _Lines) -> _Header:
    words = lines.header().lower().split()
    for word, known in zip_longest(words, _WORDS, fillvalue=""):
        if word not in known:
            raise lines.wrong(0, f"{' or '.join(known) or 'five words'}, not {word!a}")
    has_places, field, symmetry = words[2] == "coordinate", words[3], words[4]
    if field == "pattern" and not (has_places and symmetry in ("general", "symmetric")):
        raise lines.wrong(0, "coordinate and general or symmetric beside pattern")
    line = lines.take(1)
    if not line:
        raise ValueError("it must have a line of sizes, it ends before")
    sizes = line[0].split()
    if len(sizes) != 2 + has_places or not all(size.isdigit() and len(size) < 19 for size in sizes):
        raise lines.wrong(0, "numbers of rows, columns" + " and entries" * has_places)
    rows, columns, *counts = map(int, sizes)
    if symmetry != "general" and rows != columns:
        raise lines.wrong(0, f"as many rows as columns, since the matrix is {symmetry}")
    if symmetry == "general":
        counts.append(rows * columns)
    else:
        counts.append(rows * (rows + (-1 if symmetry == "skew-symmetric" else 1)) // 2)
    return _Header(has_places, field, symmetry, (rows, columns), counts[0])


def _read_matrix_market(lines: _Lines) -> Any:
    """Return the scipy matrix of a text."""
    import numpy as np
    import scipy.sparse

    header = _read_header(lines)
    if max(header.shape) > _SIDE:
        raise UnsupportedError(f"it must have at most {_SIDE} rows and columns, got {header.shape}")
    parts = [*_entries(lines, header)]
    values, rows, columns = (
        np.concatenate([part.pop(0) for part in parts] or [np.empty(0)]) for _ in range(3)
    )
    if not header.has_places:
        if header.symmetry == "general":
            return scipy.sparse.csr_array(values.reshape(header.shape, order="F"))
        columns, rows = np.triu_indices(header.shape[0], k=int(header.symmetry == "skew-symmetric"))
    if header.symmetry != "general":
        others = rows != columns
        mirrored = -values[others] if header.symmetry == "skew-symmetric" else values[others]
        values = np.concatenate((values, mirrored))
        rows, columns = np.concatenate((rows, columns[others])), np.concatenate((columns, rows[others]))
    return scipy.sparse.coo_array((values, (rows, columns)), shape=header.shape)


def _entries(lines: _Lines, header: _Header) -> Iterator[list[Any]]:
    """Yield values, rows and columns, from 0, of some entries after others; an array has no places."""
    import numpy as np

    (height, width), is_integer = header.shape, "integer" in header.field
    fields: list[tuple[str, Any]] = [("row", np.int64), ("column", np.int64)] if header.has_places else []
    wanted = ["a row", "a column"] if header.has_places else []
    if header.field != "pattern":
        fields.append(("value", np.int64 if is_integer else np.float64))
        wanted.append("an integer" if is_integer else "a number")
    done, triangle = 0, 0
    while done < header.entries:
        part = lines.parse(np.dtype(fields), ", ".join(wanted), min(header.entries - done, _LINES))
        if not len(part):
            raise ValueError(f"it must have {header.entries} entries as its sizes say, it ends after {done}")
        done += len(part)
        places: list[Any] = []
        if header.has_places:
            rows, columns = part["row"], part["column"]
            inside = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
            lines.check(inside, f"a row of 1 to {height} and a column of 1 to {width}")
            if header.symmetry != "general":
                side = np.sign(rows - columns)
                triangle = triangle or int(side[side.nonzero()][:1].sum())
                right = side * triangle >= (header.symmetry == "skew-symmetric")
                lines.check(right, f"an entry of one triangle, as a {header.symmetry} matrix has")
            places = [(rows - 1).astype(np.int32), (columns - 1).astype(np.int32)]
        values = part["value"].copy() if header.field != "pattern" else np.ones(len(part))
        if not is_integer and np.isinf(values).any():
            named = np.array(["inf" in line.lower() for line in lines.taken()])
            lines.check(~np.isinf(values) | named, "a number that float64 has")
        yield [values, *(places or [values[:0], values[:0]])]
    if lines.take(1):
        raise lines.wrong(0, f"nothing, as {header.entries} entries came before")
