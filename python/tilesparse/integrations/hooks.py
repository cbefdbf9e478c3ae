"""Hooks into PyTorch and libraries around it, which are put in once these are imported."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from .._hooks import adapt, when_imported
from ..errors import CheckpointError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

_HF = "tilesparse.integrations.transformers"


def register() -> None:
    """Have each library call back, now or as soon as it is imported."""
    for module, callback, otherwise in (
        (
            "diffusers.models.modeling_utils",
            lambda module: adapt(module.ModelMixin, "save_pretrained", _refuse_to_save),
            "save_pretrained will write block-sparse layers that nothing loads; use tilesparse.save",
        ),
        (
            "torch.distributed.checkpoint.default_planner",
            lambda module: adapt(module, "create_default_local_load_plan", _compare_and_plan),
            "torch.distributed.checkpoint will cast values of 8 or 4 bits into layers of another storage",
        ),
        (
            "torch._inductor.fx_passes.post_grad",
            _add_pass,
            "compiled layers that share an input quantize it once each",
        ),
        (
            "transformers.quantizers.auto",  # where Transformers keeps quantization methods
            lambda module: importlib.import_module(_HF),
            "from_pretrained will not load block-sparse layers, and save_pretrained will not describe them",
        ),
        (
            "transformers.quantizers.auto",
            lambda module: adapt(module.AutoQuantizationConfig, "from_dict", _refuse_dropped_formats),
            "from_pretrained may give random weights for sparse checkpoints of compressed-tensors",
        ),
        (
            "transformers.modeling_utils",
            lambda module: adapt(module.PreTrainedModel, "save_pretrained", _describe_and_save),
            "call follow(model) before save_pretrained",
        ),
        (
            "peft.tuners.lora.model",
            lambda module: adapt(module.LoraModel, "_create_new_module", _adapt_layer),
            "LoRA of block-sparse layers will be refused",
        ),
        (
            "peft.tuners.tuners_utils",
            lambda module: adapt(module, "_maybe_include_all_linear_layers", _include_block_sparse),
            'target_modules="all-linear" will pass over them',
        ),
        (
            "peft.tuners.lora.model",
            _check_before_merging,
            "merging may end between two block-sparse layers",
        ),
    ):
        when_imported(module, callback, otherwise)


# ---- PyTorch ----


def _add_pass(module: Any) -> None:
    """Have Inductor merge equal quantizations."""
    matcher: Any = importlib.import_module("torch._inductor.pattern_matcher")
    x, dtype = matcher.KeywordArg("x"), matcher.KeywordArg("dtype")
    pattern = matcher.CallFunction(sys.modules["torch"].ops.tilesparse.quantize.default, x, dtype)
    matcher.register_graph_pattern(pattern, pass_dict=module.pass_patterns[0])(_merge)


def _merge(match: Any, x: torch.fx.Node, dtype: int) -> None:
    """Replace a quantization by the first one of the same x, if nothing is written to in between."""
    node = match.output_node()
    equal = {user for user in x.users if _is_equal(user, node)}
    first = next(user for user in node.graph.nodes if user in equal)
    if first is not node:
        node.replace_all_uses_with(first)
        match.graph.erase_node(node)


def _is_equal(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    return (
        node.target is other.target
        and node.args == other.args
        and node.meta.get("mutation_region_id") == other.meta.get("mutation_region_id")
        and node.meta.get("custom", {}).get("stream") == other.meta.get("custom", {}).get("stream")
    )


def _compare_and_plan(
    plan: Any, state_dict: Mapping[str, Any], metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """Raise CheckpointError for the weight of a block-sparse layer that is stored in another way."""
    from .._checks import SCALED

    for name, tensor in state_dict.items():
        prefix, _, own = name.rpartition("weight")
        saved = metadata.state_dict_metadata.get(name)
        stored = getattr(getattr(saved, "properties", None), "dtype", None)
        if own or f"{prefix}crow_indices" not in state_dict or stored in (None, tensor.dtype):
            continue
        if not SCALED.keys().isdisjoint({stored, tensor.dtype}):
            raise CheckpointError(
                f"{name} must be {tensor.dtype} in the checkpoint, as the layer stores it, got {stored}; "
                "give the layer the storage of the checkpoint first, by to_storage or by io.reader.prepare"
            )
    return plan(state_dict, metadata, *args, **kwargs)


# ---- Transformers and Diffusers ----


_DROPPED = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")  # formats of compressed-tensors


def _refuse_dropped_formats(parse: Any, quantization_config_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse checkpoints whose sparse weights nothing in Transformers reads any more."""
    sparsity = quantization_config_dict.get("sparsity_config")
    formats = {quantization_config_dict.get("format")}
    formats |= {sparsity.get("format")} if isinstance(sparsity, Mapping) else set()
    if found := sorted(formats & {*_DROPPED}):
        raise UnsupportedError(
            f"the checkpoint stores weights as {found[0]}, which Transformers no longer reads: run "
            "tilesparse convert SOURCE FOLDER, and load that folder"
        )
    return parse(quantization_config_dict, *args, **kwargs)


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """Return what ``save_pretrained`` writes beside the weights, by file; nothing for models of others.

    Without the type of the model `from_pretrained` would make the largest of its class, from defaults.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    _follow_to_save(model)
    own = json.loads(model.config.to_json_string())
    own |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    found = {"config.json": own}
    if model.can_generate():
        found["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    return found


def _describe_and_save(save: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    _follow_to_save(model)
    return save(model, *args, **kwargs)


def _follow_to_save(model: Any) -> None:
    if _HF in sys.modules:
        sys.modules[_HF].follow_to_save(model)


def _refuse_to_save(save: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse block-sparse layers, which Diffusers has no way to describe or load."""
    from ..nn.linear import BlockSparseLinear

    for name, layer in model.named_modules():
        if isinstance(layer, BlockSparseLinear):
            raise UnsupportedError(
                f"save_pretrained of Diffusers cannot describe the block-sparse layer {name!r}; call "
                "tilesparse.save and tilesparse.load"
            )
    return save(model, *args, **kwargs)


# ---- PEFT ----


def _adapt_layer(create: Any, lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
    """Give a block-sparse layer a LoRA class of its own.

    The config does not name this one, since it would have to be unpickled where PEFT is alone.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    from ..nn.experts import ExpertsLinear
    from ..nn.linear import BlockSparseLinear

    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, BlockSparseLinear):
        if isinstance(base, ExpertsLinear):
            raise UnsupportedError("target_modules must not name experts, which have no LoRA here")
        # Imported where a model has such layers, whatever others ask of PEFT.
        from .peft import LoraLinear

        return LoraLinear(target, adapter_name, config=lora_config, **kwargs)
    return create(lora_config, adapter_name, target, **kwargs)


def _include_block_sparse(include: Any, peft_config: Any, model: Any) -> Any:
    """Include block-sparse layers in target_modules="all-linear", which would pass over them in silence."""
    targets = getattr(peft_config, "target_modules", None)
    peft_config = include(peft_config, model)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        peft_config.target_modules = {*peft_config.target_modules, *_block_sparse_layers(model)}
    return peft_config


def _block_sparse_layers(model: Any) -> set[str]:
    """Return names of layers without an adapter, and without the output embedding, as PEFT has it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    from .._checks import listed, warn_user
    from ..nn.experts import ExpertsLinear
    from ..nn.linear import BlockSparseLinear

    get_output = getattr(model, "get_output_embeddings", None)
    output = None if get_output is None else get_output()
    names: set[str] = set()
    experts: set[str] = set()
    adapted: tuple[str, ...] = ()
    for name, layer in model.named_modules():  # parents come first
        if isinstance(layer, BaseTunerLayer):
            adapted = (*adapted, f"{name}.")
        elif isinstance(layer, BlockSparseLinear) and layer is not output and not name.startswith(adapted):
            (experts if isinstance(layer, ExpertsLinear) else names).add(name)
    if experts:
        warn_user(
            'target_modules="all-linear" leaves block-sparse experts without an adapter: '
            + listed(sorted(experts))
        )
    return names


def _check_before_merging(module: Any) -> None:
    for name in ("merge_adapter", "merge_and_unload"):
        adapt(module.LoraModel, name, _check_and_merge)


def _check_and_merge(merge: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Check all layers before PEFT merges one by one: one that refuses would leave half a model merged."""
    from peft.tuners.lora.layer import LoraLayer

    from ..nn.linear import BlockSparseLinear

    names = signature(merge).bind(model, *args, **kwargs).arguments.get("adapter_names")
    owners = Counter(p for layer in model.modules() for p in layer.parameters(recurse=False))
    for name, layer in model.named_modules():
        base = layer.get_base_layer() if isinstance(layer, LoraLayer) else None
        if isinstance(base, BlockSparseLinear):
            layer.check_mergeable(names)
            if owners[base.weight] > 1:
                raise InvalidArgumentError(
                    f"merge needs a weight of its own of layer {name!r}, got one that another layer has, too"
                )
    return merge(model, *args, **kwargs)
