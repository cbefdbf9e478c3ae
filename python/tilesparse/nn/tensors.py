"""Tensors of layers, whole or sharded: names, sizes, contents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._checks import ALIGNMENT
from .resized import watch

INDEX_NAMES = ("crow_indices", "col_indices", "slot")


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor; not every build of PyTorch has the class."""
    return hasattr(tensor, "device_mesh")


def is_everywhere(tensor: Any) -> bool:
    """Return True if every process has a shard of the tensor."""
    return is_sharded(tensor) and tensor.device_mesh.size() == torch.distributed.get_world_size()


def resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, and no gradient.

    As long as a graph lives that was recorded before, such as that of the last step's loss, PyTorch takes
    gradients for the shape of that time. It forgets this shape where the dtype changes.
    """
    watch(parameter)
    parameter.grad = None
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def align(layer: nn.Module) -> None:
    """Copy tensors of a layer that kernels cannot read where they lie, as in files that were mapped."""
    for parameter in layer._parameters.values():
        if parameter is not None and _is_misaligned(parameter):
            parameter.data = parameter.detach().clone()
    for name, buffer in layer._buffers.items():
        if buffer is not None and _is_misaligned(buffer):
            layer._buffers[name] = buffer.clone()


def _is_misaligned(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return is_plain and tensor.data_ptr() % ALIGNMENT != 0


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
