"""Block-sparse linear layers that are faster than dense ones."""

from . import _belongs  # isort: split

from . import checkpoint, errors, export, functional, parallel, plot, prune, recover, storage, train, tuning
from .checkpoint import load, save
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CudaError,
    InternalError,
    InvalidArgumentError,
    InvalidPatternError,
    InvalidTypeError,
    NoDeviceError,
    PatternChangedError,
    TileSparseError,
    TuneFileError,
    UnsupportedError,
    UnsynchronizedPatternError,
)
from ._libraries import transformers_hooks
from .integrations import accelerate, peft_hooks
from .matrix import BlockSparseMatrix
from .nn import BlockSparseLinear, BlockSparseMLP, PseudoBlockSparseLinear
from .patch import BlockSparseModelPatcher, FuseReport, PatchReport
from .pattern import BlockPattern
from .tuning import Measurement, tune
from .tuning.devices import Device
from .tuning.products import Product
from .tuning.selection import KernelChoice, KernelInfo, choose, kernels, prefer

__version__ = _belongs.VERSION

tuning.load_on_import()
accelerate.register()
peft_hooks.register()
transformers_hooks.register()

__all__ = [
    "BlockPattern",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "BlockSparseMatrix",
    "BlockSparseModelPatcher",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CudaError",
    "Device",
    "FuseReport",
    "InternalError",
    "InvalidArgumentError",
    "InvalidPatternError",
    "InvalidTypeError",
    "KernelChoice",
    "KernelInfo",
    "Measurement",
    "NoDeviceError",
    "PatchReport",
    "PatternChangedError",
    "Product",
    "PseudoBlockSparseLinear",
    "TileSparseError",
    "TuneFileError",
    "UnsupportedError",
    "UnsynchronizedPatternError",
    "__version__",
    "checkpoint",
    "choose",
    "errors",
    "export",
    "functional",
    "kernels",
    "load",
    "parallel",
    "plot",
    "prefer",
    "prune",
    "recover",
    "save",
    "storage",
    "train",
    "tune",
    "tuning",
]
