"""Storages compared by torch.distributed.checkpoint, which casts what it reads to the dtype of the model.

Values have one shape in every storage, so those of int8 would become a plain layer's weight without scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from .._checks import SCALED
from ..errors import CheckpointError
from .hooks import adapt, when_imported

_LIBRARY, _PLANNER = "torch", "torch.distributed.checkpoint.default_planner"


def register() -> None:
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

    adapt(_LIBRARY, module, "create_default_local_load_plan", comparing)


def _check_storages(state_dict: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the weight of a block-sparse layer that is stored in another way."""
    for name, tensor in state_dict.items():
        prefix, _, own = name.rpartition("weight")
        stored = getattr(getattr(saved.get(name), "properties", None), "dtype", None)
        if own or f"{prefix}crow_indices" not in state_dict or stored in (None, tensor.dtype):
            continue
        if not SCALED.keys().isdisjoint({stored, tensor.dtype}):
            raise CheckpointError(
                f"{name} must be {tensor.dtype} in the checkpoint, as the layer stores it, got {stored}; "
                "give the layer the storage of the checkpoint first, by to_storage or checkpoint.prepare"
            )
