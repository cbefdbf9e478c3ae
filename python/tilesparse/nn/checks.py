"""Requirements of a layer's methods on its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .._arguments import shown
from ..errors import InvalidArgumentError, UnsupportedError
from ..storage.registry import storage_of
from .tensors import is_sharded

if TYPE_CHECKING:
    from .stored import StoredWeight

_OF_MATRICES = (
    "torch.nn.utils.parametrizations.",  # spectral_norm, weight_norm, orthogonal
    "torch.nn.utils.spectral_norm.",
    "torch.nn.utils.weight_norm.",
    "torch.nn.utils.prune.RandomStructured",
    "torch.nn.utils.prune.LnStructured",
)


def check_whole(layer: StoredWeight, method: str) -> None:
    """Raise UnsupportedError unless this process has the whole weight, as a parameter."""
    refuse_norms(layer)
    if is_sharded(layer.weight):
        raise UnsupportedError(
            f"{method} needs the whole weight, got a sharded one; call it before fully_shard or "
            "parallelize_module"
        )


def check_trainable(layer: StoredWeight, method: str) -> None:
    """Raise UnsupportedError unless the storage of the weight can be trained."""
    if not storage_of(layer.storage).trainable:
        raise UnsupportedError(
            f"{method} needs the storage 'plain', got {layer.storage!r}; call to_storage('plain')"
        )


def refuse_norms(layer: nn.Module) -> None:
    """Raise for what PyTorch hangs on a weight and takes its blocks [nnz, bn, bk] for the matrix W."""
    if "weight" in layer._parameters:
        return
    of_weight: Any = getattr(layer, "parametrizations", {})
    acting = [*of_weight["weight"]] if "weight" in of_weight else []
    for hook in layer._forward_pre_hooks.values():
        if "weight" in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)):
            acting += [hook, *getattr(hook, "_pruning_methods", ())]
    for one in acting:
        name = f"{type(one).__module__}.{type(one).__name__}"
        # The norm of all blocks at once is that of W.
        if name.startswith(_OF_MATRICES) and not ("WeightNorm" in name and getattr(one, "dim", 0) == -1):
            raise UnsupportedError(
                f"weight must not be under {name}, which takes the kept blocks [nnz, bn, bk] for the matrix "
                "[out_features, in_features]; remove it, or register a parametrization of blocks"
            )


def check_size(name: str, value: object, size: int) -> None:
    """Raise InvalidArgumentError unless a size that is assigned is the one there is."""
    if not isinstance(value, int) or value != size:
        raise InvalidArgumentError(
            f"{name} must stay {size}, as weight and pattern have it, got {shown(value)}; make another layer"
        )
