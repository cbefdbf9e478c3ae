"""Parameters of layers as PyTorch treats them: sharded, resized, in optimizers and in `torch.nn.init`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import ALIGNMENT, shown
from ..errors import InvalidArgumentError, PatternChangedError, UnsupportedError


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor; not every build of PyTorch has the class."""
    return hasattr(tensor, "device_mesh")


def is_everywhere(tensor: Any) -> bool:
    """Return True if every process has a shard of the tensor."""
    return is_sharded(tensor) and tensor.device_mesh.size() == torch.distributed.get_world_size()


def zeros_like(tensor: Any, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of another shape, sharded as the tensor is; `Tensor.new_zeros` replicates them."""
    if not is_sharded(tensor):
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    from torch.distributed.tensor import zeros

    mesh, placements = tensor.device_mesh, tensor.placements
    return zeros(shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)


def with_contents(moved: Tensor, old: Tensor) -> Tensor:
    """Return a moved tensor with the contents and dtype of the old one; zeros if that was on meta."""
    return torch.zeros_like(moved, dtype=old.dtype) if old.is_meta else old.to(moved.device, copy=True)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Write a whole tensor to the target; to a sharded one, this process's shard of it."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = (getattr(target, name) for name in ("device_mesh", "placements"))
    here = whole.to(target.device)
    everywhere = DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.copy_(everywhere.redistribute(placements=placements))


def align(layer: nn.Module) -> None:
    """Copy tensors of a layer that kernels cannot read where they lie, as in files that were mapped."""
    held: dict[str, Any] = {**layer._parameters, **layer._buffers}
    for name, tensor in held.items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        if not is_plain or tensor.data_ptr() % ALIGNMENT == 0:
            continue
        if name in layer._parameters:
            tensor.data = tensor.detach().clone()
        else:
            layer._buffers[name] = tensor.clone()


def resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, and no gradient.

    As long as a graph lives that was recorded before, such as that of the last step's loss, PyTorch takes
    gradients for the shape of that time. It forgets this shape where the dtype changes.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_states))
    _resized[parameter] = None
    parameter.grad = None
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


_resized: Any = WeakIdKeyDictionary()  # weights whose states are checked before every step of an optimizer
_hooks: list[Any] = []  # one, for all optimizers, from the first resized weight on


def has_slots(state: Tensor, weight: Tensor) -> bool:
    """Return True if a state has one part for each block of a weight [nnz, bn, bk].

    Moments have the weight's shape, factored ones have 1 in place of some dimensions, or leave them out.
    """
    nnz, bn, bk = weight.shape
    factored = {(nnz, bn, 1), (nnz, 1, bk), (nnz, 1, 1), (nnz, bn), (nnz, bk), (nnz,)}
    return state.shape == weight.shape or tuple(state.shape) in factored


def _check_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise PatternChangedError, before anything is written, for states of another number of blocks."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight in _resized]
    for weight in weights:
        for name, state in optimizer.state.get(weight, {}).items():
            if isinstance(state, Tensor) and state.numel() != 1 and not has_slots(state, weight):
                raise PatternChangedError(
                    f"{type(optimizer).__name__} keeps {name!r} of shape {list(state.shape)} for a "
                    f"block-sparse weight that now is {list(weight.shape)}: its number of blocks changed; "
                    "build the optimizer again, or load its own state_dict after that of the model"
                )


_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by ids of weights, perhaps former ones


def check_weight(layer: Any, weight: object) -> None:
    """Refuse a weight that another layer has, with another pattern, and None."""
    if not isinstance(weight, Tensor):
        raise InvalidArgumentError(f"weight must be a Parameter [nnz, bn, bk], got {shown(weight)}")
    other: Any = _owners.get(id(weight))
    if other is not layer and hasattr(other, "_pattern_if_any") and other._parameters.get("weight") is weight:
        mine, theirs = layer._pattern_if_any(), other._pattern_if_any()
        if mine is not None and theirs is not None and mine != theirs:
            raise InvalidArgumentError(
                "weight must not be that of a layer with another pattern, whose blocks lie elsewhere, got "
                f"{theirs} for {mine}; assign layer.pattern first"
            )


def note_owner(layer: nn.Module) -> None:
    """Have `torch.nn.init` know the layer by its weight."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        _owners[id(weight)] = layer


def _owner_of(tensor: Tensor) -> Any:
    """Return the layer of a weight, or of its ``data``."""
    if tensor.dim() != 3:
        return None
    for reference in _owners.valuerefs():
        layer: Any = reference()
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is tensor or _is_data_of(weight, tensor):
            return layer
    return None


def _is_data_of(weight: Tensor | None, tensor: Tensor) -> bool:
    if weight is None or weight.shape != tensor.shape or weight.is_meta or weight.device != tensor.device:
        return False
    return not is_sharded(weight) and not is_sharded(tensor) and weight.data_ptr() == tensor.data_ptr() != 0


def _fans(calculate: Callable[[Tensor], tuple[int, int]], tensor: Tensor) -> tuple[int, int]:
    layer = _owner_of(tensor)
    if layer is None:
        return calculate(tensor)
    kept = tensor.numel() if getattr(layer, "nm", None) is None else tensor.numel() // 2
    fan_out = kept / (layer.in_features * getattr(layer, "experts", 1))
    return max(1, round(kept / layer.out_features)), max(1, round(fan_out))


def _refuse(initialise: Callable[..., Tensor], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    if _owner_of(tensor) is not None:
        raise UnsupportedError(
            f"torch.nn.init.{initialise.__name__} takes the kept blocks [nnz, bn, bk] for another kind of "
            "weight; initialise an nn.Linear and convert it by BlockSparseLinear.from_linear"
        )
    return initialise(tensor, *args, **options)


for _name, _adaptation in (
    ("_calculate_fan_in_and_fan_out", _fans),
    ("orthogonal_", _refuse),
    ("dirac_", _refuse),
):
    _function: Callable[..., Any] = getattr(torch.nn.init, _name)
    setattr(torch.nn.init, _name, wraps(_function)(partial(_adaptation, _function)))
