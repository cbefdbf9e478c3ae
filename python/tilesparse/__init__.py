"""Block-sparse linear layers that are faster than dense ones."""

from . import errors, functional, parallel, storage, train
from ._C import version as _version
from .errors import (
    CudaError,
    InternalError,
    InvalidArgumentError,
    InvalidPatternError,
    NoDeviceError,
    PatternChangedError,
    TileSparseError,
    UnsupportedError,
    UnsynchronizedPatternError,
)
from .linear import BlockSparseLinear
from .matrix import BlockSparseMatrix
from .patch import BlockSparseModelPatcher, PatchReport
from .pattern import BlockPattern
from .pseudo import PseudoBlockSparseLinear

__version__ = _version()

__all__ = [
    "BlockPattern",
    "BlockSparseLinear",
    "BlockSparseMatrix",
    "BlockSparseModelPatcher",
    "CudaError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidPatternError",
    "NoDeviceError",
    "PatchReport",
    "PatternChangedError",
    "PseudoBlockSparseLinear",
    "TileSparseError",
    "UnsupportedError",
    "UnsynchronizedPatternError",
    "__version__",
    "errors",
    "functional",
    "parallel",
    "storage",
    "train",
]
