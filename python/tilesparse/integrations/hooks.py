"""Hooks into torch.compile, torch.distributed.checkpoint and the configurations of Transformers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from .._hooks import adapt, when_imported
from ..errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

_PASSES = "torch._inductor.fx_passes.post_grad"


def register_inductor() -> None:
    """Have Inductor merge equal quantizations, now or as soon as it is imported."""
    when_imported(_PASSES, _add_pass, "compiled layers that share an input quantize it once each")


def _add_pass(module: Any) -> None:
    matcher: Any = importlib.import_module("torch._inductor.pattern_matcher")
    x, dtype = matcher.KeywordArg("x"), matcher.KeywordArg("dtype")
    operators = sys.modules["torch"].ops.tilesparse
    for operator, arguments in (("quantize", (x, dtype)), ("quantize_groups", (x,))):
        pattern = matcher.CallFunction(getattr(operators, operator).default, *arguments)
        matcher.register_graph_pattern(pattern, pass_dict=module.pass_patterns[0])(_merge)


def _merge(match: Any, x: torch.fx.Node, dtype: int | None = None) -> None:
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


_PLANNER = "torch.distributed.checkpoint.default_planner"


def register_checkpoints() -> None:
    """Have plans of loading compare storages, now or as soon as that module is imported."""
    when_imported(
        _PLANNER,
        _compare_before_planning,
        "torch.distributed.checkpoint will cast values of 8 or 4 bits into layers of another storage",
    )


def _compare_before_planning(module: Any) -> None:
    def comparing(plan: Any) -> Any:
        @wraps(plan)
        def create_default_local_load_plan(state_dict: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            _check_storages(state_dict, metadata.state_dict_metadata)
            return plan(state_dict, metadata, *args, **kwargs)

        return create_default_local_load_plan

    adapt(module, "create_default_local_load_plan", comparing)


def _check_storages(state_dict: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the weight of a block-sparse layer that is stored in another way."""
    from .._checks import SCALED

    for name, tensor in state_dict.items():
        prefix, _, own = name.rpartition("weight")
        stored = getattr(getattr(saved.get(name), "properties", None), "dtype", None)
        if own or f"{prefix}crow_indices" not in state_dict or stored in (None, tensor.dtype):
            continue
        if not SCALED.keys().isdisjoint({stored, tensor.dtype}):
            raise CheckpointError(
                f"{name} must be {tensor.dtype} in the checkpoint, as the layer stores it, got {stored}; "
                "give the layer the storage of the checkpoint first, by to_storage or by io.reader.prepare"
            )


_METHODS = "transformers.quantizers.auto"  # where Transformers keeps them
_HF = "tilesparse.integrations.transformers"


def register_configurations() -> None:
    """Register the quantization method of Transformers, now or as soon as it is imported."""
    when_imported(
        _METHODS,
        lambda module: _import_hf(),
        "from_pretrained will not load block-sparse layers, and save_pretrained will not describe them",
    )
    when_imported(
        _METHODS,
        _refuse_sparse_formats,
        "from_pretrained may give random weights for sparse checkpoints of compressed-tensors",
    )
    when_imported(
        "transformers.modeling_utils",
        _describe_before_saving,
        "call follow(model) before save_pretrained if layers were not put in by the patcher",
    )


_DROPPED = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")  # formats of compressed-tensors


def _refuse_sparse_formats(module: Any) -> None:
    """Have `from_pretrained` refuse checkpoints whose sparse weights nothing there reads any more."""

    def refusing(parse: Any) -> Any:
        @wraps(parse)
        def from_dict(quantization_config_dict: Any, *args: Any, **kwargs: Any) -> Any:
            sparsity = quantization_config_dict.get("sparsity_config")
            formats = {quantization_config_dict.get("format")}
            formats |= {sparsity.get("format")} if isinstance(sparsity, Mapping) else set()
            if found := sorted(formats & {*_DROPPED}):
                raise UnsupportedError(
                    f"the checkpoint stores weights as {found[0]}, which Transformers no longer reads: run "
                    "tilesparse convert SOURCE FOLDER, and load that folder"
                )
            return parse(quantization_config_dict, *args, **kwargs)

        return staticmethod(from_dict)

    adapt(module.AutoQuantizationConfig, "from_dict", refusing)


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """Return what ``save_pretrained`` writes beside the weights, by file; nothing for models of others.

    Without the type of the model `from_pretrained` would make the largest of its class, from defaults.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    if _HF in sys.modules:
        sys.modules[_HF].following.follow_to_save(model)
    own = json.loads(model.config.to_json_string())
    own |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    found = {"config.json": own}
    if model.can_generate():
        found["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    return found


def _describe_before_saving(module: Any) -> None:
    def describing(save: Any) -> Any:
        @wraps(save)
        def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _HF in sys.modules:
                sys.modules[_HF].following.follow_to_save(self)
            return save(self, *args, **kwargs)

        return save_pretrained

    adapt(module.PreTrainedModel, "save_pretrained", describing)


def _import_hf() -> None:
    importlib.import_module(_HF)
