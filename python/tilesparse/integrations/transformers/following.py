"""Configurations of models that follow their layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..._checks import check_module
from ...config import METHOD
from ...errors import UnsupportedError
from ...nn.linear import BlockSparseLinear
from .quantizer import TileSparseConfig, TileSparseHfQuantizer, method_of, owner_of

TAGS = ("tilesparse", "block-sparse")


def follow(model: nn.Module) -> None:
    """Make the configurations of Transformers' models say what their block-sparse layers are.

    The patcher and `from_pretrained` call it. Call it yourself after you have put `BlockSparseLinear` into a
    model by other means, or have changed storages, by which the Trainer decides what may be trained. What
    `save_pretrained` writes follows the layers from then on. A model with such layers gets a configuration of
    its own, also in its submodules, so that others that were made of the same one stay as they are.

    Args:
        model: a ``PreTrainedModel``, or a module that holds some; each describes its own layers.

    Raises:
        UnsupportedError: a model is quantised by another method, since a configuration holds one.
    """
    check_can_follow(model)
    for pretrained in _pretrained(model):
        layers = [name for name, _ in sparse_layers(pretrained)]
        before = getattr(pretrained.config, "quantization_config", None)
        owner = owner_of(before)
        if owner not in (None, pretrained) and pretrained in owner.modules():
            continue  # its configuration is that of the whole, which describes its layers, too
        if owner is not pretrained and (layers or before is not None):
            shared = _give_own_config(pretrained)
        else:
            shared = None if before is None else before.instead_of
        if layers:
            config = TileSparseConfig.of(pretrained)
            config.instead_of = shared
            _untie(pretrained, layers)
            pretrained.config.quantization_config = config
            # What `tilesparse.save` has written to the file it was read from.
            vars(pretrained.config).pop(METHOD, None)
            pretrained.add_model_tags(list(TAGS))
            _tell_trainer(pretrained, config)
        elif before is not None:
            _forget(pretrained)


def follow_to_save(model: Any) -> None:
    """Make the configuration of a model that is about to be saved its own, and right, where it is neither.

    Its layers may have been patched as a part of it, put in by hand or unpickled, or it is dense and made of
    the configuration of a sparse one.
    """
    config = getattr(model.config, "quantization_config", None)
    owner = owner_of(config)
    described = owner is not None and model in owner.modules()
    if not described and (method_of(config) == METHOD or any(sparse_layers(model))):
        follow(model)


def check_can_follow(model: nn.Module) -> None:
    """Raise where `follow` would; nothing is changed."""
    check_module(model)
    for pretrained in _pretrained(model):
        config = getattr(pretrained.config, "quantization_config", None)
        method = method_of(config)
        if config is not None and method != METHOD:
            raise UnsupportedError(
                f"model: quantised by {method!s}, beside which its configuration can hold no other method; "
                "where its layers are dense again, as those of GGUF files are on the CPU, call "
                "model.hf_quantizer.remove_quantization_config(model) first"
            )


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    """Yield the block-sparse layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            yield name, module


def _pretrained(model: nn.Module) -> Iterator[Any]:
    """Yield Transformers' models in a model that are not part of another one there."""
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from _pretrained(child)


def _untie(model: Any, layers: Sequence[str]) -> None:
    """Have the configuration say that a block-sparse output embedding shares no weight any more.

    Transformers has one switch for all that a model shares, so what else it shared gets weights of its own.
    """
    before = dict(model.all_tied_weights_keys)
    weights = {f"{name}.weight" for name in layers}
    pairs = {target for target, source in before.items() if not weights.isdisjoint((target, source))}
    if not pairs:
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name in before.keys() - pairs - model.all_tied_weights_keys.keys():
        parent, _, own = name.rpartition(".")
        if parent not in layers:  # which have no weights but their own
            tensor = model.get_parameter(name)
            copied = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
            setattr(model.get_submodule(parent), own, copied)


def _tell_trainer(model: Any, config: TileSparseConfig) -> None:
    model.is_quantized = not config.is_plain()
    if model.is_quantized:
        model.hf_quantizer, model.quantization_method = TileSparseHfQuantizer(config), METHOD
    else:
        _drop_quantizer(model)


def _give_own_config(model: Any) -> Any:
    """Copy the configuration of a model, which others may have, for all its modules; return the former.

    A module may have a part of it, as of the text; one that was patched before the whole has a copy already.
    """
    from transformers import PreTrainedConfig

    shared: Any = model.config
    own: dict[int, Any] = {}
    copy.deepcopy(shared, own)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                before = getattr(getattr(value, "quantization_config", None), "instead_of", None)
                vars(module)[name] = own.get(id(value), own.get(id(before), value))
    return shared


def _forget(model: Any) -> None:
    del model.config.quantization_config
    model.is_quantized = False
    model.model_tags = [tag for tag in model.model_tags or () if tag not in TAGS]
    _drop_quantizer(model)


def _drop_quantizer(model: Any) -> None:
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
