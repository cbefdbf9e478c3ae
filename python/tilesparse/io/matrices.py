"""Single matrices: files of `scipy.sparse.save_npz` and Matrix Market.

`scipy.io.mmread` takes fractions as indices and text behind a number, and some wrong texts end the process.
"""

from __future__ import annotations

import gzip
import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from torch import Tensor

from .._files import opened, sentence
from ..errors import CheckpointError, UnsupportedError

MATRICES = (".npz", ".mtx", ".mtx.gz")
_LARGEST = 1 << 28  # elements, of which the zeros are held, too
_EXACT = 1 << 53  # magnitude from which float64 does not have all integers
_INDICES = {"shape", "indptr", "indices", "row", "col", "coords", "offsets"}
_WORDS = (
    ("%%matrixmarket",),
    ("matrix",),
    ("coordinate", "array"),
    ("real", "double", "integer", "unsigned-integer", "pattern"),
    ("general", "symmetric", "skew-symmetric", "hermitian"),
)


def read_matrix(path: Path) -> Tensor:
    """Read a matrix with its zeros: float32 of float32, otherwise float64."""
    try:
        import scipy.sparse  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("scipy is needed to read a matrix: pip install scipy") from error
    try:
        with opened(path) as stream, warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # of "1.5" as an integer in NumPy < 2.3
            warnings.simplefilter("ignore", UserWarning)  # of no entries
            if path.suffix == ".npz":
                return _dense(_read_npz(stream))
            data: Any = gzip.GzipFile(fileobj=stream) if path.suffix == ".gz" else stream
            with io.TextIOWrapper(data, encoding="ascii") as text:
                return _dense(_read_matrix_market(text))
    except UnsupportedError as error:
        raise UnsupportedError(f"{path.name}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path.name}: cannot be read: {sentence(error)}") from error


def _check_size(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"it must be a matrix with rows and columns, got shape {list(shape)}")
    if shape[0] * shape[1] > _LARGEST:
        raise UnsupportedError(
            f"the matrix must have at most {_LARGEST} elements, got {shape[0]} x {shape[1]}; "
            "BlockSparseMatrix.from_scipy takes what scipy.sparse.load_npz returns"
        )


def _dense(matrix: Any) -> Tensor:
    """Return a scipy matrix with its zeros, duplicates summed, after all checks of its arrays."""
    import numpy as np

    kind = matrix.dtype.kind
    if kind not in "fiub" or matrix.dtype.itemsize > 8:
        raise ValueError(f"it must have real numbers of at most 64 bits, got {matrix.dtype}")
    _check_size(matrix.shape)
    if matrix.format in ("bsr", "csc", "csr"):
        matrix.check_format(full_check=True)
    dtype = np.float32 if kind == "f" and matrix.dtype.itemsize <= 4 else np.float64
    before = matrix.data
    dense = (matrix if kind == "b" else matrix.astype(dtype)).toarray().astype(dtype, copy=False)
    for values in (before, dense):
        if kind in "iu" and values.size and not -_EXACT < values.min() <= values.max() < _EXACT:
            raise ValueError("integers must be below 2^53, which float64 has exactly")
    if not np.isfinite(dense).all():
        raise ValueError("values must be finite")
    return torch.from_numpy(np.ascontiguousarray(dense))


def _read_npz(stream: BinaryIO) -> Any:
    """Return a matrix of scipy, which makes integers of other indices."""
    import numpy as np
    import scipy.sparse

    with np.load(stream) as arrays:
        for name in sorted(_INDICES & {*arrays.files}):
            if arrays[name].dtype.kind not in "iu":
                raise ValueError(f"{name} must be integers, got {arrays[name].dtype}")
    stream.seek(0)
    return scipy.sparse.load_npz(stream)


def _read_matrix_market(text: TextIO) -> Any:
    import numpy as np
    import scipy.sparse

    words = text.readline().lower().split()
    for place, known in enumerate(_WORDS):
        if len(words) != len(_WORDS) or words[place] not in known:
            raise ValueError(f"line 1 must have {' or '.join(known)} as word {place + 1}, got {words[:6]}")
    has_places, field, symmetry = words[2] == "coordinate", words[3], words[4]
    line = next((line for line in text if line.strip() and not line.startswith("%")), "")
    sizes = [int(word) for word in line.split()]
    if len(sizes) != 2 + has_places or min(sizes) < 0:
        raise ValueError(
            f"its sizes must be rows, columns{', entries' * has_places}, got {line.strip()[:60]!a}"
        )
    height, width = sizes[:2]
    _check_size((height, width))
    if symmetry != "general" and height != width:
        raise ValueError(
            f"it must have as many rows as columns, since it is {symmetry}, got {height} and {width}"
        )
    if field == "pattern" and not (has_places and symmetry in ("general", "symmetric")):
        raise ValueError("it must be coordinate and general or symmetric, since it is pattern")
    is_skew = symmetry == "skew-symmetric"
    if has_places:
        count = sizes[2]
    else:
        rows, columns = np.indices((height, width)).reshape(2, -1, order="F")
        if symmetry != "general":
            rows, columns = (each[rows >= columns + is_skew] for each in (rows, columns))
        count = len(rows)
    fields: list[Any] = [("row", np.int64), ("column", np.int64)] * has_places
    if field != "pattern":
        fields.append(("value", np.int64 if "integer" in field else np.float64))
    part = np.loadtxt(text, np.dtype(fields), comments="%", ndmin=1, max_rows=count + 1)
    if len(part) != count:
        raise ValueError(f"it must have {count} entries as its sizes say, got {min(len(part), count + 1)}")
    values = part["value"] if field != "pattern" else np.ones(count)
    if has_places:
        rows, columns = part["row"] - 1, part["column"] - 1
        if not ((rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)).all():
            raise ValueError(f"rows must be 1 to {height} and columns 1 to {width}, got others")
    if symmetry != "general":
        below = rows - columns
        if not ((below >= is_skew).all() or (below <= -is_skew).all()):
            raise ValueError(f"entries must be of one triangle, since it is {symmetry}, got others")
        values = np.concatenate((values, (-values if is_skew else values)[below != 0]))
        rows, columns = (
            np.concatenate((one, other[below != 0])) for one, other in ((rows, columns), (columns, rows))
        )
    return scipy.sparse.coo_array((values, (rows, columns)), shape=(height, width))
