"""Block-sparse linear layers that are faster than dense ones."""

from . import _belongs  # isort: split

from . import (
    checkpoint,
    errors,
    export,
    functional,
    parallel,
    plot,
    prune,
    quantization,
    recover,
    storage,
    train,
    tuning,
)
from ._libraries import checkpoint_hooks, inductor_hooks, transformers_hooks
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
from .integrations import accelerate, diffusers, peft_hooks
from .matrix import BlockSparseMatrix
from .nn import BlockSparseExperts, BlockSparseLinear, BlockSparseMLP, PseudoBlockSparseLinear, concatenate
from .patch import BlockSparseModelPatcher, FuseReport, PatchReport, sparsify_
from .pattern import BlockPattern
from .prune import prune_
from .quantization import quantize_
from .recover import distill
from .tuning import tune
from .tuning.advise import advise
from .tuning.choose import choose, kernels, prefer

# Paths of 0.1.0: descriptions that few users make themselves, at home in `tuning`.
from .tuning import Measurement as Measurement  # isort: skip
from .tuning.product import Device as Device  # isort: skip
from .tuning.product import Product as Product  # isort: skip
from .tuning.choose import KernelChoice as KernelChoice, KernelInfo as KernelInfo  # isort: skip

__version__ = _belongs.VERSION

tuning.load_on_import()
accelerate.register()
checkpoint_hooks.register()
diffusers.register()
inductor_hooks.register()
peft_hooks.register()
transformers_hooks.register()

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
    "PseudoBlockSparseLinear",
    "TileSparseError",
    "TuneFileError",
    "UnsupportedError",
    "UnsynchronizedPatternError",
    "__version__",
    "advise",
    "checkpoint",
    "choose",
    "concatenate",
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
    "quantization",
    "quantize_",
    "recover",
    "save",
    "sparsify_",
    "storage",
    "train",
    "tune",
    "tuning",
]
