"""What keeps a linear layer from becoming a block-sparse one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from .._checks import DTYPES
from ..config import QUANTIZED_BY_NAME
from ..errors import InvalidArgumentError
from ..nn.convert import dense_weight
from .modules import is_linear


class Match(NamedTuple):
    """A layer to replace, all its names, the options for it, and whether a pattern writes its name out."""

    module: nn.Module
    names: list[str]
    options: dict[str, Any]
    named: bool


class CannotBeCutError(InvalidArgumentError):
    """A weight's shape is no multiple of the block shape."""


NOT_LINEAR = "not nn.Linear"


def reason_not_patchable(module: nn.Module) -> str:
    """Say why `is_patchable` refuses a module."""
    if is_linear(module):
        return "is_patchable refuses it"
    if isinstance(module, nn.LazyLinear):
        return "not initialised yet; pass a batch through the model first"
    if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
        return "parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if isinstance(module, nn.Linear):
        return "a subclass of nn.Linear, which may compute something else; override is_patchable to patch it"
    return NOT_LINEAR


def reason_not_sparse(module: Any, options: Mapping[str, Any]) -> str | None:
    """What keeps a dense layer with these options from becoming a sparse one that is of use."""
    own = sorted({*module._parameters, *module._buffers, *module._modules})
    if own != ["bias", "weight"]:
        return f"it holds {', '.join(own)} in place of weight and bias (remove weight_norm, pruning, … first)"
    if module.weight.dtype not in DTYPES:
        return f"its weight is {module.weight.dtype}, for which there are no sparse layers"
    if module.weight.numel() == 0:
        return "its weight is empty"
    (bn, bk), density = options["block_shape"], options["density"]
    out_features, in_features = dense_weight(module).shape
    fits = out_features % bn == 0 and in_features % bk == 0  # another reason otherwise, which comes later
    blocks = (out_features // bn) * (in_features // bk)
    if options["pattern"] is None and fits and density > 0 and round(density * blocks) == 0:
        return f"density {density:g} of its {blocks} blocks in {bn}x{bk} rounds to none"
    return None


def check_blocks_can_be_chosen(module: Any, block_shape: Sequence[int]) -> None:
    """Raise CannotBeCutError unless the blocks of a dense layer can be ranked."""
    sizes = zip(("out_features", "in_features"), dense_weight(module).shape, strict=True)
    for (name, size), block in zip(sizes, block_shape, strict=True):
        if size % block:
            raise CannotBeCutError(
                f"block_shape: {tuple(block_shape)} does not fit, {name} is {size}, no multiple of {block}"
            )
    if module.weight.is_meta:
        raise InvalidArgumentError(
            "pattern: expected, because on the meta device there are no weights to choose blocks by"
        )
    if bool(module.weight.isnan().any()):
        raise InvalidArgumentError("its weight has NaN, so its blocks cannot be ranked")


def check_can_be_stored(module: Any, storage: str) -> None:
    """Raise InvalidArgumentError for weights that are not finite and are to be stored in 8 bits."""
    weight = module.weight
    if storage in QUANTIZED_BY_NAME and not weight.is_meta and not bool(weight.isfinite().all()):
        raise InvalidArgumentError(
            f"storage: {storage!r} is for finite weights, and its weight is not finite"
        )
