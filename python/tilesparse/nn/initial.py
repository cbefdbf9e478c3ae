"""Initial patterns and values of layers, also where processes have shards of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..pattern.block_pattern import BlockPattern
from ..storage.registry import storage_of
from ..storage.values import two_of_four
from .checks import check_trainable
from .origin import Source
from .tensors import fill, is_everywhere, is_sharded

if TYPE_CHECKING:
    from .linear import BlockSparseLinear


def reset(layer: BlockSparseLinear, generator: torch.Generator | None) -> None:
    """Draw weight and bias of a layer, and its pattern if it has none; see `reset_parameters`."""
    if layer.weight.is_meta:
        return
    on_cpu = generator is not None and generator.device.type == "cpu"
    for_pattern, sharded = generator if on_cpu else None, is_sharded(layer.weight)
    if sharded:
        check_trainable(layer, "reset_parameters of a sharded layer")
        for_pattern, generator = _common_generators(layer.weight, generator)
    if layer.origin.source is Source.MISSING:
        layer.pattern = _random_pattern(layer, for_pattern)
        if is_everywhere(layer.weight):
            layer.declare_shared()
    bn, bk = layer.block_shape
    fan_in = layer.crow_indices.diff() * bk
    if layer.nm is not None:
        fan_in = fan_in // 2
    bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0)
    block_rows, _ = layer.pattern.block_indices()
    wanted = layer.spec
    if not storage_of(wanted.storage).trainable:
        layer.allocate(wanted.with_storage("plain"), layer.weight.device)
    drawn = _draw(layer.weight, bound[block_rows, None, None], generator)
    if layer.mask is not None:
        fill(layer.mask, two_of_four(drawn.abs(), transposable=layer.transposable))
    if not sharded:
        layer.to_storage(wanted.storage, per=wanted.scales or "row", activations=wanted.activations)
    if layer.bias is not None:
        _draw(layer.bias, bound.repeat_interleave(bn, output_size=layer.out_features), generator)


def _random_pattern(layer: BlockSparseLinear, generator: torch.Generator | None) -> BlockPattern:
    if layer.shard is not None:
        return layer.shard.random(layer.index(), generator)
    spec = layer.spec
    experts = spec.experts or 1
    parts = (experts, 1) if spec.nnz % experts == 0 else (1, 1)
    return BlockPattern.random(
        spec.shape, block_shape=spec.block_shape, nnz=spec.nnz, parts=parts, generator=generator
    )


def _draw(parameter: nn.Parameter, bound: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a parameter uniformly from ±bound, which is broadcast; return the whole tensor."""
    device = parameter.device if generator is None else generator.device
    numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    numbers.uniform_(-1, 1, generator=generator).mul_(bound.to(numbers))
    fill(parameter, numbers)
    return numbers.to(parameter.device)


def _common_generators(
    sharded: Any, generator: torch.Generator | None
) -> tuple[torch.Generator, torch.Generator]:
    """Return generators on the CPU and the tensor's device, with one seed in all processes of its mesh."""
    device = generator.device if generator is not None else "cpu"
    seed = torch.randint(2**62, (), generator=generator, device=device).to(sharded.device)
    for dim in range(sharded.device_mesh.ndim):
        group = sharded.device_mesh.get_group(dim)
        torch.distributed.broadcast(seed, torch.distributed.get_global_rank(group, 0), group)
    devices = torch.device("cpu"), sharded.device
    on_cpu, on_device = (torch.Generator(device).manual_seed(int(seed)) for device in devices)
    return on_cpu, on_device
