"""Hugging Face's Transformers: `save_pretrained` and `from_pretrained` of models with block-sparse layers.

`import tilesparse` suffices: once Transformers is imported as well, before or after, its `from_pretrained`
knows the method "tilesparse" of a ``quantization_config``. Functions that change layers and `from_pretrained`
set the configuration of a model, and `save_pretrained` sets it anew, to what the layers are at that moment.
docs/huggingface.md says more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import DTYPES, check_module
from .._files import StoredTensor, read_header
from ..config import METHOD
from ..errors import CheckpointError, InvalidArgumentError, InvalidPatternError, UnsupportedError
from ..io.manifest import VERSION, check_belongs, parsed_layers, section
from ..io.reader import prepare
from ..model.match import add_listener, layers_changed
from ..model.replace import densify_
from ..nn.linear import BlockSparseLinear
from ..nn.weight import INDEX_NAMES, align
from ..storage.formats import STORED_NAMES, forms_of, storage_of

try:
    import transformers
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"tilesparse needs Transformers 5.17 or newer (pip install transformers): {error}"
    ) from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"tilesparse needs Transformers 5.17 or newer, got {transformers.__version__}")


@register_quantizer(METHOD)
class TileSparseHfQuantizer(HfQuantizer):
    """Quantizer that loads block-sparse layers, and tells the Trainer what it may train.

    A model whose layers are all stored plain is an ordinary one once it is loaded: it keeps no quantizer, and
    ``is_quantized`` is False. Other storages are trained by adapters alone, so such a model keeps it.
    """

    def __init__(self, quantization_config: TileSparseConfig, **kwargs: Any) -> None:
        """Take the section of a checkpoint."""
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise InvalidArgumentError(
                "quantization_config must not be given for a dense checkpoint; call tilesparse.sparsify_ on "
                "the model"
            )

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` may always write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters are, as x has a gradient in every storage."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True where the layers themselves are: with dense blocks alone."""
        plain: bool = self.quantization_config.is_plain()
        return plain

    @property
    def is_compileable(self) -> bool:
        """Return True: generation may always be compiled."""
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
                "without, and see tilesparse.distributed"
            )
        given = self.quantization_config.to_dict()
        layers = named_as_in(model, given["layers"])
        prepare(model, {"version": VERSION, "layers": {own: entry for own, (_, entry) in layers.items()}})
        self._empty = {own: model.get_submodule(own) for own in layers}
        sparse = {name: self._empty[own] for own, (name, _) in layers.items()}
        check_files(sparse, checkpoint_files or (), given.get("files", {}))
        self._shapes = {name: tensor.shape for name, tensor in tensors_of(model)}
        # Transformers then casts floating tensors to the dtypes of the model, and only those. Before it had
        # get_new_dtype, it left tensors whose names change, as with another head, in the dtype of the file.
        self.pre_quantized = hasattr(self, "get_new_dtype")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.pre_quantized = True
        for name, tensor in tensors_of(model):
            if name in self._shapes and tensor.shape != self._shapes[name]:  # which 5.17 does not compare
                raise CheckpointError(
                    f"{name} must have shape {tuple(self._shapes[name])}, as in the model, got "
                    f"{tuple(tensor.shape)}"
                )
        for name, layer in self._empty.items():
            settle(name, layer)
        del self._empty, self._shapes
        layers_changed(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        densify_(model)
        return model if dtype is None else model.to(dtype)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@register_quantization_config(METHOD)
class TileSparseConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with block-sparse layers, with a section as of `io.manifest`.

    Args:
        section: ``version`` and ``layers``.
    """

    quant_method = METHOD

    def __init__(self, **section: Any) -> None:
        section.pop("quant_method", None)
        parsed_layers(section)
        self._section = section

    def to_dict(self) -> dict[str, Any]:
        """Return the section as it is written."""
        return {"quant_method": METHOD, **copy.deepcopy(self._section)}

    def is_plain(self) -> bool:
        """Return True if all layers can be trained."""
        return all(entry["storage"] == "plain" for entry in self.to_dict()["layers"].values())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as a dict does, which Transformers expects of configurations from no file."""
        return self.to_dict().get(key, default)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())


def method_of(config: Any) -> Any:
    """Return the name of the method of a quantization_config, which may be a dict."""
    if isinstance(config, Mapping):  # of a model that was not made by from_pretrained
        return config.get("quant_method")
    return None if config is None else config.quant_method


OWN = ("weight", "bias", *INDEX_NAMES, *STORED_NAMES)  # names of a layer's tensors


def named_as_in(model: Any, layers: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return of each layer that a model has, by its name there, the name in the checkpoint and the entry.

    A model without the head of the one that was saved, or with another, has names with or without the prefix
    of the base model, and lacks some, which Transformers reports as unexpected. A layer with an adapter does
    not lack but has another name: it would be dense and random.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    prefix, found = f"{model.base_model_prefix}.", {}

    def find(name: str, experts: bool = False) -> str | None:
        if experts:  # projections of dense experts are no modules
            parent, _, own = name.rpartition(".")
            there = find(parent)
            return find(name) or (None if there is None else f"{there}.{own}")
        return next((own for own in (name, prefix + name, name.removeprefix(prefix)) if own in modules), None)

    for name, entry in layers.items():
        own = find(name, entry.get("experts") is not None)
        outer = find(name.removesuffix(".base_layer"))
        if own is None and outer is not None:
            raise CheckpointError(
                f"layers: {name!r} lies inside {outer!r}, which is a {type(modules[outer]).__name__} here: "
                "the model was saved with an adapter in it; merge or remove the adapter before saving"
            )
        if own is not None:  # of another kind of module, `prepare` refuses it
            dtype = _dtype_of(modules, own, entry["dtype"])
            found[own] = name, {**entry, "dtype": str(dtype).removeprefix("torch.")}
    if layers and not found:
        raise InvalidArgumentError(
            f"layers: none of them is in {type(model).__name__}, as {next(iter(layers))!r}"
        )
    return found


def _dtype_of(modules: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the dtype of the weight of a layer, or of the parameters that are dense experts' there."""
    if name in modules:
        return getattr(getattr(modules[name], "weight", None), "dtype", default)
    dense = modules[name.rpartition(".")[0]]
    return next((parameter.dtype for parameter in dense.parameters(recurse=False)), default)


def check_files(layers: Mapping[str, nn.Module], files: Sequence[str], checksums: Mapping[str, str]) -> None:
    """Check that files hold what layers need, before anything is read, and belong to the configuration.

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
            _check_forms(name, given, dict(tensors_of(layer)))


def _check_forms(name: str, given: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]) -> None:
    for own, source in given.items():
        if own not in expected:
            raise CheckpointError(f"{name}.{own}: not in the form that the configuration describes")
        shape, dtype = tuple(expected[own].shape), expected[own].dtype
        alike = source.dtype == dtype or (source.dtype in DTYPES and dtype in DTYPES)
        if source.shape != shape or not alike:
            raise CheckpointError(
                f"{source.file.name}: '{name}.{own}' must have shape {shape} of {dtype}, as the "
                f"configuration describes it, got {source.shape} of {source.dtype}"
            )


def settle(name: str, layer: BlockSparseLinear) -> None:
    """Check what was loaded into a layer, and undo what Transformers does to tensors of other kinds."""
    if not hasattr(layer, "_hf_hook"):  # tensors that were moved to be offloaded have lost the mark
        for own, tensor in tensors_of(layer):
            if not hasattr(tensor, "_is_hf_initialized"):
                raise CheckpointError(f"{name}.{own}: missing in the checkpoint")
    dtypes = {own: dtype for own, (_, dtype) in forms_of(layer.spec).items()} | dict.fromkeys(
        INDEX_NAMES, torch.int32
    )
    weight = layer.weight.detach().to(dtypes.pop("weight"))
    layer.weight = nn.Parameter(weight, storage_of(layer.storage).trainable)
    if layer.metadata is not None and layer.metadata.is_floating_point():
        raise UnsupportedError(
            f"{name}.metadata: rounded by Transformers, which keeps this layer in float32; load the model "
            "with dtype=torch.float32, or store the layer plain"
        )
    for own, dtype in dtypes.items():  # others have survived that
        layer._buffers[own] = layer.get_buffer(own).to(dtype)
    align(layer)
    try:
        _ = layer.pattern
    except InvalidPatternError as error:
        raise CheckpointError(f"layer {name!r}: {error}") from error


# ---- configurations of models with block-sparse layers ----


def follow(model: nn.Module) -> None:
    """Make the configurations of Transformers' models say what their block-sparse layers are.

    Functions that change layers and `from_pretrained` call it. Call it yourself after you have put
    `BlockSparseLinear` into a model by other means, or have changed storages, by which the Trainer decides
    what may be trained.
    `save_pretrained` calls it in any case.

    Args:
        model: a ``PreTrainedModel``, or a module that holds some; each describes its own layers.

    Raises:
        UnsupportedError: a model is quantised by another method, since a configuration holds one.
    """
    check_can_follow(model)
    for pretrained in _pretrained(model):
        layers = [name for name, _ in sparse_layers(pretrained)]
        if layers:
            config = TileSparseConfig(**section(pretrained))
            _untie(pretrained, layers)
            pretrained.config.quantization_config = config
            # The section that `tilesparse.save` has written to the file it was read from.
            vars(pretrained.config).pop(METHOD, None)
            _tell_trainer(pretrained, config)
        elif method_of(getattr(pretrained.config, "quantization_config", None)) == METHOD:
            del pretrained.config.quantization_config
            pretrained.is_quantized = False
            _drop_quantizer(pretrained)


def follow_to_save(model: Any) -> None:
    """Make the configuration of a model that is about to be saved right, whatever its layers were before."""
    is_described = method_of(getattr(model.config, "quantization_config", None)) == METHOD
    if is_described or any(sparse_layers(model)):
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
    from transformers.modeling_utils import PreTrainedModel  # which imports quantizers, and so this module

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
    shared, own = model.config, copy.deepcopy(model.config)  # which models that stay tied may have, too
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own
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


def _drop_quantizer(model: Any) -> None:
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)


__all__ = ["follow"]

add_listener(check_can_follow, follow)
