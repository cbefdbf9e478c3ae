"""Have the layers of a model that are called with one x, such as q, k and v, share one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .._names import names_of_modules
from ..nn.joined import reason_not_one
from ..nn.joint import Joint, JointLinear, join
from ..nn.linear import BlockSparseLinear
from .modules import owners_of_parameters
from .one_input import called_with_one_input


@dataclass(frozen=True)
class SharedProduct:
    """Layers of one x, in the order in which they are called.

    Attributes:
        names: names of the layers.
        reason: why each has a product of its own; None where they share one.
    """

    names: tuple[str, ...]
    reason: str | None


def join_layers(model: nn.Module) -> list[SharedProduct]:
    """Have layers share products where all but their rows is alike; say what was done, and why not.

    Args:
        model: changed in place; its parameters are frozen.
    """
    names, found = names_of_modules(model), []
    owners = owners_of_parameters(names)
    for module in names:
        for group in called_with_one_input(module):
            layers = [module._modules.get(name) for name in group]
            sparse = [layer for layer in layers if isinstance(layer, BlockSparseLinear)]
            if len(sparse) < 2:
                continue
            reason = _reason_apart(sparse, owners)
            if reason is None and _joint_of(sparse) is None:
                join(sparse)
            found.append(SharedProduct(tuple(names[layer][0] for layer in sparse), reason))
    return found


def _reason_apart(
    layers: Sequence[BlockSparseLinear], owners: dict[nn.Parameter, list[nn.Module]]
) -> str | None:
    """Say why layers of one x keep products of their own, or return None."""
    for layer in layers:
        if layer.shard is not None:
            return "their weight is sharded"
        if type(layer) not in (BlockSparseLinear, JointLinear) or "forward" in vars(layer):
            return f"one is a {type(layer).__name__} with a forward of its own"
        if "weight" not in layer._parameters or hasattr(layer, "_hf_hook"):
            return "something else gives one of them its weight in each call"
        if any(len(owners[parameter]) > 1 for parameter in layer.parameters(recurse=False)):
            return "one has a parameter that another module has, too"
        if any(tensor.is_inference() for tensor in layer.index()[:3]):
            return "a pattern was made in inference mode, where PyTorch counts no writes to it"
        if isinstance(layer, JointLinear) and layer.joint is not None and _joint_of(layers) is None:
            return "one shares a product with other layers"
    return reason_not_one(layers)


def _joint_of(layers: Sequence[BlockSparseLinear]) -> Joint | None:
    """Return the product that all of these layers share already, if they do."""
    joints = {layer.joint if isinstance(layer, JointLinear) else None for layer in layers}
    return joints.pop() if len(joints) == 1 else None
