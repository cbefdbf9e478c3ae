"""Block-sparse linear layers that are faster than dense ones."""

from . import _belongs  # isort: split

from . import checkpoint, errors, export, functional, parallel, plot, prune, recover, storage, train, tuning
from ._libraries import transformers_hooks
from .checkpoint import load, save
from .config import BlockSparseConfig, LayerSpec
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
from .inference import prepare_for_inference
from .integrations import accelerate, peft_hooks
from .matrix import BlockSparseMatrix
from .nn import BlockSparseLinear, BlockSparseMLP, PseudoBlockSparseLinear
from .patch import BlockSparseModelPatcher, FuseReport, PatchReport, sparsify_
from .pattern import BlockPattern
from .prune import prune_
from .recover import distill
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
    "BlockSparseConfig",
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
    "LayerSpec",
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
    "distill",
    "errors",
    "export",
    "functional",
    "kernels",
    "load",
    "parallel",
    "plot",
    "prefer",
    "prepare_for_inference",
    "prune",
    "prune_",
    "recover",
    "save",
    "sparsify_",
    "storage",
    "train",
    "tune",
    "tuning",
]
