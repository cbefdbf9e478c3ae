"""Registration with PEFT, which learns of block-sparse layers once it has been imported."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from inspect import signature
from typing import Any

from .._hooks import adapt, when_imported
from ..errors import InvalidArgumentError


def register() -> None:
    """Make LoRA of PEFT know `tilesparse.integrations.peft`, now or as soon as it is imported."""
    for name, callback, otherwise in (
        ("lora.model", _adapt_layers, "LoRA of block-sparse layers will be refused"),
        ("tuners_utils", _include_in_all_linear, 'target_modules="all-linear" will pass over them'),
        ("lora.model", _check_before_merging, "merging may end between two block-sparse layers"),
    ):
        when_imported(f"peft.tuners.{name}", callback, otherwise)


def _adapt_layers(module: Any) -> None:
    """LoRA on a block-sparse layer has a class of its own, unless its config names another one.

    The config does not name this one, since it would have to be unpickled where PEFT is alone.
    """
    from ..nn.experts import ExpertsLinear
    from ..nn.linear import BlockSparseLinear

    def adapted(create: Any) -> Any:
        @wraps(create)
        def create_new_module(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
            base = target.get_base_layer() if isinstance(target, layer_class) else target
            named = tuple(getattr(lora_config, "_custom_modules", None) or ())
            if isinstance(base, BlockSparseLinear) and not isinstance(base, named):
                # Imported where a model has such layers, whatever others ask of PEFT.
                from .peft import LoraExperts, LoraLinear

                adapted = LoraExperts if isinstance(base, ExpertsLinear) else LoraLinear
                return adapted(target, adapter_name, config=lora_config, **kwargs)
            return create(lora_config, adapter_name, target, **kwargs)

        return create_new_module

    layer_class = module.BaseTunerLayer
    adapt(module.LoraModel, "_create_new_module", adapted)


def _include_in_all_linear(module: Any) -> None:
    """target_modules="all-linear" would pass over block-sparse layers in silence."""

    def adapted(include: Any) -> Any:
        @wraps(include)
        def include_block_sparse(peft_config: Any, model: Any) -> Any:
            targets = getattr(peft_config, "target_modules", None)
            peft_config = include(peft_config, model)
            if isinstance(targets, str) and targets.lower() == "all-linear":
                names = _block_sparse_layers(layer_class, model)
                peft_config.target_modules = {*peft_config.target_modules, *names}
            return peft_config

        return include_block_sparse

    layer_class = module.BaseTunerLayer
    adapt(module, "_maybe_include_all_linear_layers", adapted)


def _block_sparse_layers(tuner_layer: Any, model: Any) -> set[str]:
    """Return names of layers without an adapter, and without the output embedding, as PEFT has it."""
    from .._reports import listed, warn_user
    from ..nn.experts import ExpertsLinear
    from ..nn.linear import BlockSparseLinear

    get_output = getattr(model, "get_output_embeddings", None)
    output = None if get_output is None else get_output()
    names: set[str] = set()
    experts: set[str] = set()
    adapted: tuple[str, ...] = ()
    for name, layer in model.named_modules():  # parents come first
        if isinstance(layer, tuner_layer):
            adapted = (*adapted, f"{name}.")
        elif isinstance(layer, BlockSparseLinear) and layer is not output and not name.startswith(adapted):
            (experts if isinstance(layer, ExpertsLinear) else names).add(name)
    if experts:
        warn_user(
            'target_modules="all-linear" leaves experts without an adapter, as in dense models; name them in '
            f"target_modules to adapt them: {listed(sorted(experts))}"
        )
    return names


def _check_before_merging(module: Any) -> None:
    """PEFT merges layer by layer, and one that refuses would leave a model of which half is merged."""
    from ..nn.linear import BlockSparseLinear

    def checked(merge: Any) -> Any:
        @wraps(merge)
        def merge_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            names = signature(merge).bind(self, *args, **kwargs).arguments.get("adapter_names")
            owners = Counter(p for layer in self.modules() for p in layer.parameters(recurse=False))
            for name, layer in self.named_modules():
                base = layer.get_base_layer() if isinstance(layer, layer_class) else None
                if isinstance(base, BlockSparseLinear):
                    layer.check_mergeable(names)
                    if owners[base.weight] > 1:
                        raise InvalidArgumentError(
                            f"merge needs a weight of its own of layer {name!r}, got one that another "
                            "layer has, too"
                        )
            return merge(self, *args, **kwargs)

        return merge_checked

    layer_class = module.LoraLayer
    for name in ("merge_adapter", "merge_and_unload"):
        adapt(module.LoraModel, name, checked)
