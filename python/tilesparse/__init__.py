"""Block-sparse linear layers that are faster than dense ones."""

from . import (
    _belongs,
    distributed,
    errors,
    export,
    functional,
    io,
    plot,
    prune,
    quantize,
    recover,
    storage,
    train,
    tuning,
)
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
from .integrations import accelerate, diffusers, hooks, peft_hooks
from .io import load, save
from .matrix import BlockSparseMatrix
from .model import BlockSparseModelPatcher, FuseReport, PatchReport, sparsify_
from .model.inference import prepare_for_inference_
from .nn import BlockSparseExperts, BlockSparseLinear, BlockSparseMLP, ReferenceBlockSparseLinear, concatenate
from .pattern import BlockPattern
from .prune import prune_
from .quantize import quantize_
from .recover import distill_

# Paths of 0.1.0: descriptions that few users make themselves, at home in `tuning`.
from .tuning import Measurement as Measurement
from .tuning import tune
from .tuning.advise import advise
from .tuning.choose import KernelChoice as KernelChoice
from .tuning.choose import KernelInfo as KernelInfo
from .tuning.choose import choose, kernels, prefer
from .tuning.product import Device as Device
from .tuning.product import Product as Product

__version__ = _belongs.VERSION

tuning.load_on_import()
accelerate.register()
diffusers.register()
hooks.register_checkpoints()
hooks.register_configurations()
hooks.register_inductor()
peft_hooks.register()

__all__ = [
    "BlockPattern",
    "BlockSparseConfig",
    "BlockSparseExperts",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "BlockSparseMatrix",
    "BlockSparseModelPatcher",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CudaError",
    "FuseReport",
    "InternalError",
    "InvalidArgumentError",
    "InvalidPatternError",
    "InvalidTypeError",
    "LayerSpec",
    "NoDeviceError",
    "PatchReport",
    "PatternChangedError",
    "ReferenceBlockSparseLinear",
    "TileSparseError",
    "TuneFileError",
    "UnsupportedError",
    "UnsynchronizedPatternError",
    "__version__",
    "advise",
    "choose",
    "concatenate",
    "distill_",
    "distributed",
    "errors",
    "export",
    "functional",
    "io",
    "kernels",
    "load",
    "plot",
    "prefer",
    "prepare_for_inference_",
    "prune",
    "prune_",
    "quantize",
    "quantize_",
    "recover",
    "save",
    "sparsify_",
    "storage",
    "train",
    "tune",
    "tuning",
]
