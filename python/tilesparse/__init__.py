"""Block-sparse linear layers that are faster than dense ones."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING

from . import _hooks
from .integrations import hooks

if TYPE_CHECKING:
    from . import distributed, errors, functional, nn, storage, train, tuning
    from .config import BlockSparseConfig
    from .errors import TileSparseError
    from .io import convert, load, save
    from .matrix import BlockSparseMatrix
    from .model.activations import sparsify_activations_
    from .model.inference import prepare_for_inference_
    from .model.replace import densify_, sparsify_
    from .model.report import summary
    from .nn import BlockSparseExperts, BlockSparseLinear, BlockSparseMLP
    from .pattern import BlockPattern
    from .prune.driver import prune_
    from .quantize.driver import quantize_
    from .recover.distillation import distill_
    from .recover.reconstruction import reconstruct_
    from .tuning.advise import advise

__version__ = "0.1.0"  # of these Python files; that of the library is in tilesparse.h
_AGAIN = "install the package again: pip install --force-reinstall --no-deps tilesparse"
try:
    from . import _C
except ImportError as error:
    if error.name is None:
        raise  # the module's own check, which says what to do
    raise ImportError(
        f"tilesparse: the native module in {__path__[0]} cannot be loaded: {error}. If it is missing, the "
        "source tree comes before the installed package: leave that folder. If a symbol is, another "
        f"libtilesparse comes before the package's own: see LD_LIBRARY_PATH. Otherwise {_AGAIN}"
    ) from error
if _C.version() != __version__:
    raise ImportError(
        f"tilesparse: the Python files in {__path__[0]} are version {__version__}, and the native module "
        f"{_C.__file__} is {_C.version()}; {_AGAIN}"
    )

_MODULES = {  # that have a name; each is imported when it is first used
    "BlockPattern": "pattern",
    "BlockSparseConfig": "config",
    "BlockSparseExperts": "nn",
    "BlockSparseLinear": "nn",
    "BlockSparseMLP": "nn",
    "BlockSparseMatrix": "matrix",
    "TileSparseError": "errors",
    "advise": "tuning.advise",
    "convert": "io",
    "densify_": "model.replace",
    "distill_": "recover.distillation",
    "load": "io",
    "prepare_for_inference_": "model.inference",
    "prune_": "prune.driver",
    "quantize_": "quantize.driver",
    "reconstruct_": "recover.reconstruction",
    "save": "io",
    "sparsify_": "model.replace",
    "sparsify_activations_": "model.activations",
    "summary": "model.report",
}

__all__ = [
    "BlockPattern",
    "BlockSparseConfig",
    "BlockSparseExperts",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "BlockSparseMatrix",
    "TileSparseError",
    "__version__",
    "advise",
    "convert",
    "densify_",
    "distill_",
    "distributed",
    "errors",
    "functional",
    "load",
    "nn",
    "prepare_for_inference_",
    "prune_",
    "quantize_",
    "reconstruct_",
    "save",
    "sparsify_",
    "sparsify_activations_",
    "storage",
    "summary",
    "train",
    "tuning",
]


__getattr__ = _hooks.lazily(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(torch: ModuleType) -> None:
    """Register torch.ops.tilesparse, and let count what was measured."""
    importlib.import_module("._ops.products", __name__)
    measurements = importlib.import_module("._files", __name__).tune_file()
    if measurements is not None and measurements.exists():
        importlib.import_module(".tuning.store", __name__).load_on_import()


class _TorchFirst(MetaPathFinder):
    """Finder of nothing, which has PyTorch imported, and products registered, before a module needs them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, module = fullname.partition(".")
        if package == __name__ and module and module not in _WITHOUT_TORCH:
            sys.meta_path.remove(self)
            importlib.import_module("torch")


_WITHOUT_TORCH = {"_C", "errors", "jax"}  # and the modules that are imported above

hooks.register()
if "torch" not in sys.modules:
    sys.meta_path.insert(0, _TorchFirst())
_hooks.when_imported("torch", _register, "its operators are not registered")
