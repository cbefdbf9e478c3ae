"""Block-sparse linear layers that are faster than dense ones."""

from . import _peft, _transformers, checkpoint, errors, functional, parallel, prune, storage, train
from ._C import version as _version
from .checkpoint import load, save
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
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

_peft.register()
_transformers.register()

__all__ = [
    "BlockPattern",
    "BlockSparseLinear",
    "BlockSparseMatrix",
    "BlockSparseModelPatcher",
    "CheckpointError",
    "CheckpointNotFoundError",
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
    "checkpoint",
    "errors",
    "functional",
    "load",
    "parallel",
    "prune",
    "save",
    "storage",
    "train",
]
