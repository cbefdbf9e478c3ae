"""Experts that several processes share: some experts each, or some features of every expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from .._checks import Index
from ..errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from ..nn.experts import BlockSparseExperts
from ..nn.experts_linear import ExpertsLinear
from ..nn.known_experts import NORM
from ..nn.origin import PatternOrigin
from ..nn.parts import stored_of
from ..nn.tensors import INDEX_NAMES
from ..pattern.block_pattern import BlockPattern
from ..storage.base import STORED_NAMES
from .expert_shards import ExpertsShard, ShardOfColumns, ShardOfExperts, ShardOfRows
from .patterns import broadcast_patterns
from .shards import distributed, sharded_by_slots

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _ExpertsStyle(ParallelStyle):
    """Both styles of `BlockSparseExperts`: give each process its shard of both projections."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, BlockSparseExperts):
            raise InvalidArgumentError(
                f"{type(self).__name__} must be given BlockSparseExperts, got {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise InvalidArgumentError(
                f"device_mesh must have one dimension, got {device_mesh.ndim}; give mesh['name']"
            )
        layers = list(module.projections().values())
        shards = self._shards(module, device_mesh)
        for layer, shard in zip(layers, shards, strict=True):
            _check_weight(layer, device_mesh.size())
            shard.check_sizes(layer)
        for layer, shard in zip(layers, shards, strict=True):
            _share(layer, device_mesh, shard, getattr(self, "src_data_rank", 0))
        return module

    def _shards(self, module: BlockSparseExperts, mesh: DeviceMesh) -> list[ExpertsShard]:
        raise NotImplementedError


class ExpertParallel(_ExpertsStyle):
    """A style of `parallelize_module` that divides `BlockSparseExperts` by their experts.

    Every process gets equally many experts. All processes compute with the same tokens, each with those that
    are routed to its own experts, and the results are summed: what others compute costs it no products.

    Every process keeps equally many blocks: experts that keep fewer get blocks of zeros, which are trained as
    others are. ``weight`` becomes a DTensor that is sharded by slots, and so do ``mask``, ``metadata`` and
    ``scales``; ``bias`` is sharded by experts. The buffers of the pattern describe all experts in every
    process, so a state dict is that of the whole layers.

    Raises:
        InvalidArgumentError: the module is none of experts, the mesh has several dimensions, or the number of
            experts is not a multiple of the processes.
        UnsupportedError: a weight is not a plain parameter, for example because it is sharded already.
        UnsynchronizedPatternError: the processes have other numbers of blocks, or block shapes.
    """

    def _shards(self, module: BlockSparseExperts, mesh: DeviceMesh) -> list[ExpertsShard]:
        return [ShardOfExperts(mesh, module.num_experts) for _ in range(2)]


class ExpertTensorParallel(_ExpertsStyle):
    """A style of `parallelize_module` that divides each expert of `BlockSparseExperts` by its features.

    Every process gets equally many rows of gate and up, and columns of down, of each expert. All processes
    compute with the same tokens, and the results are summed. The bias of gate and up is replicated, that of
    down too, and added once. All else is as in `ExpertParallel`.

    Raises:
        InvalidArgumentError: as `ExpertParallel`, or the features between the projections are not a multiple
            of the processes times the size of a block.
        UnsupportedError: as `ExpertParallel`, or there is a norm behind each expert, which needs whole rows.
        UnsynchronizedPatternError: as `ExpertParallel`.
    """

    def _shards(self, module: BlockSparseExperts, mesh: DeviceMesh) -> list[ExpertsShard]:
        if NORM in module._modules:
            raise UnsupportedError(
                "ExpertTensorParallel needs experts without a norm behind each; use ExpertParallel"
            )
        experts, halves = module.num_experts, module.halves
        return [ShardOfRows(mesh, experts, halves), ShardOfColumns(mesh, experts)]


def _check_weight(layer: ExpertsLinear, count: int) -> None:
    if type(layer._parameters.get("weight")) is not nn.Parameter:
        raise UnsupportedError(
            f"parallelize_module needs a plain parameter as weight, got {type(layer.weight).__name__}; "
            "call it before fully_shard, and without parametrizations"
        )
    if layer.weight.is_meta and len(layer.col_indices) % count:
        raise InvalidPatternError(
            f"pattern must have a number of blocks that is a multiple of {count}, the number of processes, "
            f"got {len(layer.col_indices)}"
        )


def _share(layer: ExpertsLinear, mesh: DeviceMesh, shard: ExpertsShard, source: int | None) -> None:
    """Shard a projection in place."""
    if not layer.weight.is_meta:
        layer.to(mesh.device_type)
        pattern = layer.pattern
        if source is not None:
            group = mesh.get_group()
            (pattern,) = broadcast_patterns({"": layer}, group, dist.get_global_rank(group, source))
        _arrange(layer, *shard.padded(pattern.to("cpu")))
        if source is not None and mesh.size() == dist.get_world_size():
            layer.declare_shared()
    weight = sharded_by_slots(layer.weight.detach(), mesh, source)
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    for name in STORED_NAMES:
        if layer._buffers[name] is not None:
            layer._buffers[name] = sharded_by_slots(layer.get_buffer(name), mesh, source)
    if layer.bias is not None:
        bias = distributed(layer.bias.detach(), mesh, shard.bias_placement(), source)
        layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
    kept: Any = shard
    layer.shard = kept


@torch.no_grad()
def _arrange(layer: ExpertsLinear, pattern: BlockPattern, slots: Tensor) -> None:
    """Give a layer another pattern, with its blocks at ``slots``, and zeros where that is -1."""
    stored = stored_of(layer, "parallelize_module")
    slots = slots.to(layer.weight.device)
    tensors = {name: tensor[slots.clamp(min=0)] for name, tensor in stored.tensors.items() if name != "bias"}
    tensors["weight"].view(torch.uint8)[slots < 0] = 0  # which is 0 in every storage
    layer.assign(replace(stored.spec, nnz=pattern.nnz), tensors)
    index: Index = pattern.index_on(layer.weight.device)
    for name, array in zip(INDEX_NAMES, index[:3], strict=True):
        layer._buffers[name] = array
    layer.origin = PatternOrigin.loaded(layer.index())
