"""Registration with Accelerate, which loads checkpoints with block-sparse layers into dense models, too."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from .._hooks import adapt, when_imported
from .._listeners import layers_changed


def register() -> None:
    """Make ``load_checkpoint_and_dispatch`` know checkpoints with block-sparse layers, once it is there."""
    when_imported(
        "accelerate.big_modeling",
        _prepare_before_loading,
        "load_checkpoint_and_dispatch needs a model on which tilesparse.io.load was called",
    )


def _prepare_before_loading(module: Any) -> None:
    def preparing(load: Any) -> Any:
        parameters = signature(load)

        @wraps(load)
        def load_checkpoint_in_model(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            model, path = given["model"], Path(given["checkpoint"])
            from ..io.manifest import CONFIG
            from ..io.reader import prepare_for

            folder = path if path.is_dir() else path.parent
            layers: list[str] = []
            if (folder / CONFIG).exists():
                layers = prepare_for(model, folder, given.get("dtype"))
            result = load(*args, **kwargs)
            _check(model, layers)
            return result

        return load_checkpoint_in_model

    adapt(module, "load_checkpoint_in_model", preparing)


def _check(model: Any, layers: list[str]) -> None:
    """Have layers look at the patterns that they were given, unless these are offloaded."""
    from ..nn.linear import BlockSparseLinear

    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, BlockSparseLinear)
        if not layer.slot.is_meta:
            _ = layer.pattern
    if layers:
        layers_changed(model)
