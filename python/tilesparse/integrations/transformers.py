"""Hugging Face's Transformers: `save_pretrained` and `from_pretrained` of models with block-sparse layers.

`import tilesparse` suffices: once Transformers is imported as well, before or after, its `from_pretrained`
knows the method "tilesparse" of a ``quantization_config``. The patcher and `from_pretrained` give a model a
configuration that follows its layers, so that `save_pretrained` writes what they are at that moment.
docs/huggingface.md says more.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import transformers
except ImportError as error:
    raise ImportError("tilesparse.hf: Transformers 5.17 or newer expected, got none") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"tilesparse.hf: Transformers 5.17 or newer expected, got {transformers.__version__}")
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._arguments import checked
from .._checks import DTYPES, check_module, check_text
from .._libraries.hooks import TRANSFORMERS, revert
from .._runtime.tensor_files import StoredTensor, check_belongs, read_header
from ..checkpoint.manifest import METHOD, VERSION, check_section, prepare, section
from ..errors import CheckpointError, InvalidArgumentError, InvalidPatternError, UnsupportedError
from ..nn.convert import is_conv1d
from ..nn.linear import BlockSparseLinear
from ..nn.tensors import INDEX_NAMES
from ..patch.modules import set_submodule, share_hooks
from ..storage.base import STORED_NAMES
from ..storage.registry import forms_of

for _name in ("_process_model_before_weight_loading", "_process_model_after_weight_loading", "_dequantize"):
    if not hasattr(HfQuantizer, _name):
        raise ImportError(
            f"tilesparse.hf: Transformers with HfQuantizer.{_name} expected, got {transformers.__version__}"
        )

TAGS = ("tilesparse", "block-sparse")
OWN = ("weight", "bias", *INDEX_NAMES, *STORED_NAMES)  # names of a layer's tensors


@register_quantization_config(METHOD)
class TileSparseConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with block-sparse layers, a section as in `checkpoint.section`.

    One that `follow` has made reads the layers of its model whenever it is asked. Copies and pickles hold
    what was read last, unless the model is copied along.

    Args:
        section: ``version`` and ``layers``.

    Raises:
        InvalidArgumentError: the section is of a newer version, or wrong.
    """

    quant_method = METHOD

    def __init__(self, **section: Any) -> None:
        section.pop("quant_method", None)
        check_section(section)
        self._section = section
        self._model: Callable[[], nn.Module | None] = _nobody
        self.untied: dict[str, str] = {}  # pairs that the model has shared before
        self.instead_of: Any = None  # the configuration that the model had before, others may have it still

    @classmethod
    def of(cls, model: nn.Module) -> TileSparseConfig:
        """One that follows a model."""
        config = cls(**section(model))
        config._model = weakref.ref(model)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The section as it is written: of the layers as they are now, if the model is still there."""
        model = self._model()
        if model is not None:
            self._section = section(model)
        return {"quant_method": METHOD, **copy.deepcopy(self._section)}

    def is_plain(self) -> bool:
        """Whether all layers can be trained."""
        return all(entry["storage"] == "plain" for entry in self.to_dict()["layers"].values())

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict, which Transformers expects a configuration to be that was not loaded from a file."""
        return self.to_dict().get(key, default)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> TileSparseConfig:
        copied = TileSparseConfig(**self.to_dict())
        with_it = memo.get(id(self._model()))
        if isinstance(with_it, nn.Module):
            copied._model, copied.untied = weakref.ref(with_it), self.untied
        return copied

    def __reduce__(self) -> tuple[Callable[..., TileSparseConfig], tuple[dict[str, Any]]]:
        return _rebuild, (self.to_dict(),)


def _nobody() -> None:
    """The model of a configuration without one."""


def _rebuild(section: dict[str, Any]) -> TileSparseConfig:
    return TileSparseConfig(**section)


@register_quantizer(METHOD)
class TileSparseHfQuantizer(HfQuantizer):
    """Makes `from_pretrained` load block-sparse layers, and tells the Trainer what it may train.

    A model whose layers are all stored plain is an ordinary one once it is loaded: it keeps no quantizer, and
    ``is_quantized`` is False. Other storages are trained by adapters alone, so such a model keeps it.
    """

    def __init__(self, quantization_config: TileSparseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise InvalidArgumentError(
                "quantization_config: a checkpoint with block-sparse layers expected, got a dense one; load "
                "it without, and make its layers sparse with tilesparse.BlockSparseModelPatcher"
            )

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model: always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are: x has a gradient in every storage."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """The layers themselves are in the storage "plain" alone."""
        plain: bool = self.quantization_config.is_plain()
        return plain

    @property
    def is_compileable(self) -> bool:
        """Whether generation may be compiled: always."""
        return True

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedError(
                "distributed_config, tp_plan: Transformers cannot split block-sparse layers; load the model "
                "without, and see tilesparse.parallel"
            )
        given = self.quantization_config.to_dict()
        layers = _named_as_in(model, given["layers"])
        prepare(model, {"version": VERSION, "layers": {own: entry for own, (_, entry) in layers.items()}})
        self._empty = {own: model.get_submodule(own) for own in layers}
        sparse = {name: self._empty[own] for own, (name, _) in layers.items()}
        _check_files(sparse, checkpoint_files or (), given.get("files", {}))
        self._shapes = {name: tensor.shape for name, tensor in _tensors(model)}
        # Transformers then casts floating tensors to the dtypes of the model, and only those. Before it had
        # get_new_dtype, it left tensors whose names change, as with another head, in the dtype of the file.
        self.pre_quantized = hasattr(self, "get_new_dtype")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.pre_quantized = True
        for name, tensor in _tensors(model):
            if name in self._shapes and tensor.shape != self._shapes[name]:  # which 5.17 does not compare
                raise CheckpointError(
                    f"{name}: shape {tuple(self._shapes[name])} expected, as the model has it, got "
                    f"{tuple(tensor.shape)}"
                )
        for name, layer in self._empty.items():
            _settle(name, layer)
        del self._empty, self._shapes
        follow(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return to_dense(model, dtype)


def unregister() -> None:
    """Make Transformers forget the method "tilesparse", so that `from_pretrained` refuses such checkpoints.

    Models that are there keep their configurations. ``import tilesparse`` in a new process registers again.
    """
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    revert(TRANSFORMERS)


@checked
def follow(model: nn.Module) -> None:
    """Makes the configurations of Transformers' models say what their block-sparse layers are.

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
        layers = [name for name, _ in _sparse(pretrained)]
        before = getattr(pretrained.config, "quantization_config", None)
        owner = _owner(before)
        if owner not in (None, pretrained) and pretrained in owner.modules():
            continue  # its configuration is that of the whole, which describes its layers, too
        if owner is not pretrained and (layers or before is not None):
            shared = _give_own_config(pretrained)
        else:
            shared = None if before is None else before.instead_of
        if layers:
            config = TileSparseConfig.of(pretrained)
            config.untied = _retie(pretrained, before) or _untie(pretrained, layers)
            config.instead_of = shared
            pretrained.config.quantization_config = config
            # What `tilesparse.save` has written to the file it was read from.
            vars(pretrained.config).pop(METHOD, None)
            pretrained.add_model_tags(list(TAGS))
            _tell_trainer(pretrained, config)
        elif before is not None:
            _forget(pretrained, before)


def follow_to_save(model: Any) -> None:
    """Makes the configuration of a model that is about to be saved its own, and right, where it is neither.

    Its layers may have been patched as a part of it, put in by hand or unpickled, or it is dense and made of
    the configuration of a sparse one.
    """
    config = getattr(model.config, "quantization_config", None)
    owner = _owner(config)
    described = owner is not None and model in owner.modules()
    if not described and (_method(config) == METHOD or any(_sparse(model))):
        follow(model)


def check_can_follow(model: nn.Module) -> None:
    """Raises where `follow` would; nothing is changed."""
    check_module(model)
    for pretrained in _pretrained(model):
        config = getattr(pretrained.config, "quantization_config", None)
        method = _method(config)
        if config is not None and method != METHOD:
            raise UnsupportedError(
                f"model: quantised by {method!s}, beside which its configuration can hold no other method; "
                "where its layers are dense again, as those of GGUF files are on the CPU, call "
                "model.hf_quantizer.remove_quantization_config(model) first"
            )


@checked
def to_dense(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Gives a model of Transformers its dense layers back, zero where no block was kept, in place.

    ``model.dequantize()`` does the same where layers are not stored plain; a model with plain layers alone
    is not quantised to Transformers, which refuses there.

    Args:
        model: a ``PreTrainedModel``.
        dtype: of the whole model then; None leaves it.

    Returns:
        The model.

    Raises:
        UnsupportedError: weights are offloaded, layers have adapters, or `follow` refuses the model. It is as
            it was.
    """
    check_can_follow(model)
    layers = list(_sparse(model))
    for name, layer in layers:
        if layer.weight.is_meta:
            raise UnsupportedError(f"layer {name!r}: its weight is offloaded; load the model without")
        if name.endswith(".base_layer"):
            raise UnsupportedError(f"layer {name!r}: has an adapter; merge or remove it first")
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    there = dict(twin.named_modules(remove_duplicate=False))
    dense = {layer: _as_dense(layer, there.get(name)) for name, layer in layers}
    names = [
        (name, module) for name, module in model.named_modules(remove_duplicate=False) if module in dense
    ]
    for name, layer in names:  # a layer that the model shares has several
        share_hooks(layer, dense[layer])
        set_submodule(model, name, dense[layer])
    follow(model)
    return model if dtype is None else model.to(dtype)


@checked
def model_card(model: Any, repository: str = "path/or/repository") -> str:
    """A README.md for the Hub: how to load the model, a check that it is sparse then, and its layers.

    Args:
        model: a ``PreTrainedModel`` with block-sparse layers.
        repository: from where the card says to load.

    Raises:
        InvalidArgumentError: no layer is block-sparse.
    """
    check_module(model)
    check_text("repository", repository)
    layers = dict(_sparse(model))
    if not layers:
        raise InvalidArgumentError("model: one with block-sparse layers expected, got none")
    rows = [_row(name, layer) for name, layer in layers.items()]
    total = sum(tensor.nbytes for _, tensor in _tensors(model))
    return _CARD.format(
        tags="".join(f"\n- {tag}" for tag in TAGS),
        name=type(model).__name__,
        repository=repository,
        layers=len(layers),
        bytes=f"{total:,}",
        rows="\n".join(rows),
    )


_CARD = """---
library_name: transformers
tags:{tags}
---

# {name} with block-sparse layers

{layers} linear layers of this model keep some of their blocks alone. TileSparse multiplies by those
and skips the others.

```bash
pip install tilesparse transformers
```

```python
import tilesparse  # without it from_pretrained cannot load the layers
from transformers import {name}

model = {name}.from_pretrained("{repository}")
sparse = [layer for layer in model.modules() if isinstance(layer, tilesparse.BlockSparseLinear)]
if len(sparse) != {layers}:
    raise RuntimeError(f"{{len(sparse)}} block-sparse layers in place of {layers}: not this model")
```

Without `import tilesparse` Transformers warns of an "Unknown quantization type, got tilesparse" and refuses,
because the weights have other shapes than dense ones. Do not answer with `ignore_mismatched_sizes=True`: it
leaves these layers dense, with random weights.

The model takes {bytes} bytes.

| layer | shape | block | density | storage | bytes | dense |
|---|---|---|---|---|---|---|
{rows}
"""


def _row(name: str, layer: BlockSparseLinear) -> str:
    (bn, bk), shape = layer.block_shape, f"{layer.out_features}x{layer.in_features}"
    storage = layer.storage if layer.nm is None else f"2:4 {layer.storage}"
    held = sum(tensor.nbytes for _, tensor in _tensors(layer))
    bias = 0 if layer.bias is None else layer.bias.nbytes
    dense = layer.out_features * layer.in_features * layer.spec.dtype.itemsize + bias
    cells = (name, shape, f"{bn}x{bk}", f"{layer.density:.3f}", storage, f"{held:,}", f"{dense:,}")
    return f"| {' | '.join(cells)} |"


def _sparse(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            yield name, module


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _pretrained(model: nn.Module) -> Iterator[Any]:
    """Transformers' models in a model that are not part of another one there."""
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from _pretrained(child)


# What `follow` changes in a model besides its ``quantization_config``.


def _untie(model: Any, layers: Sequence[str]) -> dict[str, str]:
    """A block-sparse output embedding does not share the weight of the input embedding any more.

    Transformers has one switch for all that a model shares, so what else it shared gets weights of its own.

    Returns:
        What shared the weight of a layer: by its name that of what it was tied to.
    """
    before = dict(model.all_tied_weights_keys)
    weights = {f"{name}.weight" for name in layers}
    pairs = {target: source for target, source in before.items() if not weights.isdisjoint((target, source))}
    if pairs:
        _set_tied(model, False)
        for name in before.keys() - pairs.keys() - model.all_tied_weights_keys.keys():
            parent, _, own = name.rpartition(".")
            if parent not in layers:  # which have no weights but their own
                tensor = model.get_parameter(name)
                copied = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
                setattr(model.get_submodule(parent), own, copied)
    return pairs


def _retie(model: Any, config: Any) -> dict[str, str]:
    """The pairs that a configuration has untied; none once they are one parameter again, as after `undo`."""
    pairs: dict[str, str] = getattr(config, "untied", {})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = [name in parameters and parameters[name] is parameters.get(pairs[name]) for name in pairs]
    if not pairs or not all(shared):
        return pairs
    _set_tied(model, True)
    model.tie_weights()
    return {}


def _set_tied(model: Any, tied: bool) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _tell_trainer(model: Any, config: TileSparseConfig) -> None:
    model.is_quantized = not config.is_plain()
    if model.is_quantized:
        model.hf_quantizer, model.quantization_method = TileSparseHfQuantizer(config), METHOD
    else:
        _drop_quantizer(model)


def _method(config: Any) -> Any:
    if isinstance(config, Mapping):  # of a model that was not made by from_pretrained
        return config.get("quant_method")
    return None if config is None else config.quant_method


def _give_own_config(model: Any) -> Any:
    """Copies the configuration of a model, which others may have, for all its modules; returns the former.

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


def _owner(config: Any) -> nn.Module | None:
    """The model that a configuration follows; another one may hold the same."""
    return config._model() if isinstance(config, TileSparseConfig) else None


def _forget(model: Any, config: Any) -> None:
    del model.config.quantization_config
    model.is_quantized = False
    model.model_tags = [tag for tag in model.model_tags or () if tag not in TAGS]
    _drop_quantizer(model)
    _retie(model, config)


def _drop_quantizer(model: Any) -> None:
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)


def _as_dense(layer: BlockSparseLinear, there: Any) -> Any:
    """The dense layer of the kind that a model has there, which is None for layers put in by hand."""
    linear = layer.to_linear()
    if layer.storage != "plain":  # whose values cannot be trained, but those of dense layers can
        linear.weight.requires_grad_(True)
    if not is_conv1d(there) and (type(there) is nn.Linear or not isinstance(there, nn.Linear)):
        return linear
    weight = linear.weight.detach()
    weight = weight.T.contiguous() if is_conv1d(there) else weight
    there.weight = nn.Parameter(weight, linear.weight.requires_grad)
    there.bias = linear.bias
    there.train(linear.training)
    return there


# What loading checks.


def _named_as_in(model: Any, layers: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each layer that a model has, by its name there: the name in the checkpoint, and the entry.

    A model without the head of the one that was saved, or with another, has names with or without the prefix
    of the base model, and lacks some, which Transformers reports as unexpected. A layer with an adapter does
    not lack but has another name: it would be dense and random.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    prefix, found = f"{model.base_model_prefix}.", {}

    def find(name: str) -> str | None:
        return next((own for own in (name, prefix + name, name.removeprefix(prefix)) if own in modules), None)

    for name, entry in layers.items():
        own = find(name)
        outer = find(name.removesuffix(".base_layer"))
        if own is None and outer is not None:
            raise CheckpointError(
                f"layers: {name!r} lies inside {outer!r}, which is a {type(modules[outer]).__name__} here: "
                "the model was saved with an adapter in it; merge or remove the adapter before saving"
            )
        if own is not None:  # of another kind of module, `prepare` refuses it
            dtype = getattr(getattr(modules[own], "weight", None), "dtype", entry["dtype"])
            found[own] = name, {**entry, "dtype": str(dtype).removeprefix("torch.")}
    if layers and not found:
        raise InvalidArgumentError(
            f"layers: none of them is in {type(model).__name__}, as {next(iter(layers))!r}"
        )
    return found


def _check_files(layers: Mapping[str, nn.Module], files: Sequence[str], checksums: Mapping[str, str]) -> None:
    """That files hold what layers need, before anything is read, and belong to the configuration.

    Layers that Transformers stores under other names are only checked once they are loaded.
    """
    stored: dict[str, StoredTensor] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            tensors, checksum = read_header(file)
            check_belongs(file.name, checksum, checksums)
            stored |= tensors
    for name, layer in layers.items():
        given = {own: stored[f"{name}.{own}"] for own in OWN if f"{name}.{own}" in stored}
        if given:
            _check_forms(name, given, dict(_tensors(layer)))


def _check_forms(name: str, given: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]) -> None:
    different = sorted(given.keys() ^ expected.keys())
    if different:
        there = "there, but not" if different[0] in given else "missing, but"
        raise CheckpointError(f"{name}.{different[0]}: {there} in the form that the configuration describes")
    for own, source in given.items():
        shape, dtype = tuple(expected[own].shape), expected[own].dtype
        alike = source.dtype == dtype or (source.dtype in DTYPES and dtype in DTYPES)
        if source.shape != shape or not alike:
            raise CheckpointError(
                f"{source.file.name}: '{name}.{own}': shape {shape} of {dtype} expected, as the "
                f"configuration describes it, got {source.shape} of {source.dtype}"
            )


def _settle(name: str, layer: BlockSparseLinear) -> None:
    """Checks what was loaded into a layer, and undoes what Transformers does to tensors of other kinds."""
    if not hasattr(layer, "_hf_hook"):  # tensors that were moved to be offloaded have lost the mark
        for own, tensor in _tensors(layer):
            if not hasattr(tensor, "_is_hf_initialized"):
                raise CheckpointError(f"{name}.{own}: missing in the checkpoint")
    dtypes = {own: dtype for own, (_, dtype) in forms_of(layer.spec).items()} | dict.fromkeys(
        INDEX_NAMES, torch.int32
    )
    weight = layer.weight.detach().to(dtypes.pop("weight"))
    layer.weight = nn.Parameter(weight, layer.storage == "plain")
    if layer.metadata is not None and layer.metadata.is_floating_point():
        raise UnsupportedError(
            f"{name}.metadata: rounded by Transformers, which keeps this layer in float32; load the model "
            "with dtype=torch.float32, or store the layer plain"
        )
    for own, dtype in dtypes.items():  # others have survived that
        layer._buffers[own] = layer.get_buffer(own).to(dtype)
    try:
        _ = layer.pattern
    except InvalidPatternError as error:
        raise CheckpointError(f"layer {name!r}: {error}") from error
