"""Ties to PEFT that do not import it: it is told of block-sparse layers once it has been imported."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from inspect import signature
from typing import Any

from ._hooks import when_imported
from .adapter import AdaptedLinear
from .errors import InvalidArgumentError
from .linear import BlockSparseLinear


def register() -> None:
    """Makes LoRA of PEFT know `tilesparse.peft`, now or as soon as it is imported."""
    when_imported("peft.tuners.lora.config", _register_layer)
    when_imported("peft.tuners.tuners_utils", _include_in_all_linear)
    when_imported("peft.tuners.lora.model", _check_before_merging)


def _register_layer(module: Any) -> None:
    """Every LoraConfig, also one read from a file, comes with the class for block-sparse layers.

    PEFT keeps such classes with each config alone, and does not save them.
    """
    made = module.LoraConfig.__post_init__

    @wraps(made)
    def __post_init__(self: Any) -> None:
        made(self)
        self._register_custom_module({BlockSparseLinear: _lora_linear})

    module.LoraConfig.__post_init__ = __post_init__


def _lora_linear(*args: Any, **kwargs: Any) -> Any:
    """Imports the class where a model has such layers, whatever other models ask of PEFT."""
    from .peft import LoraLinear

    return LoraLinear(*args, **kwargs)


def _include_in_all_linear(module: Any) -> None:
    """target_modules="all-linear" would pass over block-sparse layers in silence."""
    include = module._maybe_include_all_linear_layers

    @wraps(include)
    def include_block_sparse(peft_config: Any, model: Any) -> Any:
        targets = getattr(peft_config, "target_modules", None)
        peft_config = include(peft_config, model)
        if isinstance(targets, str) and targets.lower() == "all-linear":
            peft_config.target_modules = {*peft_config.target_modules, *_block_sparse_layers(module, model)}
        return peft_config

    module._maybe_include_all_linear_layers = include_block_sparse


def _block_sparse_layers(module: Any, model: Any) -> set[str]:
    """Names of the layers, without the output embedding, as PEFT has it, and what has an adapter already."""
    get_output = getattr(model, "get_output_embeddings", None)
    output = None if get_output is None else get_output()
    names: set[str] = set()
    adapted: tuple[str, ...] = ()
    for name, layer in model.named_modules():  # parents come first
        if isinstance(layer, module.BaseTunerLayer | AdaptedLinear):
            adapted = (*adapted, f"{name}.")
        elif isinstance(layer, BlockSparseLinear) and layer is not output and not name.startswith(adapted):
            names.add(name)
    return names


def _check_before_merging(module: Any) -> None:
    """PEFT merges layer by layer, and one that refuses would leave a model of which half is merged."""

    def checked(merge: Any) -> Any:
        @wraps(merge)
        def merge_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            names = signature(merge).bind(self, *args, **kwargs).arguments.get("adapter_names")
            owners = Counter(p for layer in self.modules() for p in layer.parameters(recurse=False))
            for name, layer in self.named_modules():
                base = layer.get_base_layer() if isinstance(layer, module.LoraLayer) else None
                if isinstance(base, BlockSparseLinear):
                    layer.check_mergeable(names)
                    if owners[base.weight] > 1:
                        raise InvalidArgumentError(
                            f"merge: a weight of its own expected of layer {name!r}, got one that another "
                            "layer has, too"
                        )
            return merge(self, *args, **kwargs)

        return merge_checked

    for name in ("merge_adapter", "merge_and_unload"):
        setattr(module.LoraModel, name, checked(getattr(module.LoraModel, name)))
