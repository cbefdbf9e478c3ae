"""Experts that several processes share: some experts each, or some features of every expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from .._checks import Index
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.experts import NORM, BlockSparseExperts, ExpertsLinear
from ..nn.weight import Stored, become, stored_of
from ..pattern import BlockPattern
from ..storage.formats import STORED_NAMES
from .tensor_parallel import (
    PatternShard,
    added_once,
    check_mesh,
    check_multiple,
    check_plain,
    local_of,
    share,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_BETWEEN = "features between the projections"


class _ExpertsStyle(ParallelStyle):
    """Both styles of `BlockSparseExperts`: give each process its shard of both projections."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, BlockSparseExperts):
            raise InvalidArgumentError(
                f"{type(self).__name__} must be given BlockSparseExperts, got {type(module).__name__}"
            )
        check_mesh(device_mesh)
        layers = list(module.projections().values())
        shards = self._shards(module, device_mesh)
        for layer, shard in zip(layers, shards, strict=True):
            check_plain(layer, device_mesh)
            shard.check_sizes(layer)
        for layer, shard in zip(layers, shards, strict=True):
            share(layer, device_mesh, shard, getattr(self, "src_data_rank", 0))
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


class ExpertsShard(PatternShard):
    """This process's shard of one projection of experts.

    Attributes:
        experts: how many weights this process multiplies by, below each other.
    """

    experts: int

    def check_sizes(self, layer: ExpertsLinear) -> None:
        """Raise InvalidArgumentError unless the layer can be divided."""

    @torch.no_grad()
    def arrange(self, layer: Any, pattern: BlockPattern) -> None:
        """Give a layer this pattern, padded with blocks of zeros, with slots in the order of the shards."""
        pattern, slots = self.padded(pattern.to("cpu"))
        stored = stored_of(layer, "parallelize_module")
        slots = slots.to(layer.weight.device)
        tensors = {
            name: tensor if stored.is_by_feature(name) else tensor[slots.clamp(min=0)]
            for name, tensor in stored.tensors.items()
            if name != "bias"
        }
        tensors["weight"].view(torch.uint8)[slots < 0] = 0  # which is 0 in every storage
        become(layer, Stored(replace(stored.spec, nnz=pattern.nnz), pattern, tensors))

    def tensors(self, layer: ExpertsLinear) -> dict[str, Tensor | None]:
        """Return this process's tensors, by the names that the layer has for them."""
        found = {name: local_of(layer._buffers[name]) for name in STORED_NAMES}
        if layer.activations is not None:  # scales are those of rows
            found["scales"] = self._own_rows(found["scales"])
        return {"weight": local_of(layer.weight), "bias": self._bias(layer.bias), **found}

    def entered(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return tokens, their experts and weights as this process computes with them, and how many experts.

        All processes have the same ones, and their gradients are sums over the processes.
        """
        x, weights = (
            DTensor.from_local(one, self._mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            for one in (x, weights)
        )
        return x, index, weights, self.experts

    def left(self, y: Tensor) -> Tensor:
        """Return the sum over all processes."""
        part = DTensor.from_local(y, self._mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard.

        Experts have equally many, too, where the number of blocks allows it.
        """
        nnz = like.col_indices.shape[0]
        fine, coarse = self._divisions()
        parts = fine if nnz % (fine[0] * fine[1]) == 0 else coarse
        options: Any = {"block_shape": like.block_shape, "nnz": nnz, "generator": generator}
        return self.arranged(self._unfolded(BlockPattern.random(like.shape, parts=parts, **options)))

    def _divisions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return parts of equally many blocks: each shard of each expert, and each shard."""
        raise NotImplementedError

    def _unfolded(self, pattern: BlockPattern) -> BlockPattern:
        """Return a pattern whose parts are shards."""
        return pattern

    def padded(self, pattern: BlockPattern) -> tuple[BlockPattern, Tensor]:
        """Return the pattern with equally many blocks in each shard, and in their order.

        Also returns, for every slot, the slot of its block in the given pattern; -1 for blocks that are new.
        """
        shards, (rows, columns) = self._shard_of(pattern), pattern.block_indices()
        counts = torch.bincount(shards, minlength=self._mesh.size())
        blocks = [torch.stack((rows, columns), 1)]
        for shard, missing in enumerate((counts.max() - counts).tolist()):
            if missing:
                blocks.append(self._others(pattern, shard)[:missing])
        whole = BlockPattern.from_blocks(
            torch.cat(blocks), shape=pattern.shape, block_shape=pattern.block_shape
        )
        order = self.order(whole)
        return self.arranged(whole), torch.where(order < pattern.nnz, order, -1)

    def _others(self, pattern: BlockPattern, shard: int) -> Tensor:
        """Return (row, column) of the blocks of a shard that are not kept."""
        every = BlockPattern.from_block_mask(
            torch.ones(pattern.grid, dtype=torch.bool, device="cpu"), block_shape=pattern.block_shape
        )
        blocks = torch.stack(every.block_indices(), 1)
        kept = pattern.to_block_mask().cpu()[blocks[:, 0], blocks[:, 1]]
        return blocks[(self._shard_of(every) == shard) & ~kept]

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        raise NotImplementedError

    def _own_rows(self, of_rows: Tensor) -> Tensor:
        """Return what belongs to the rows that this process multiplies by, of its local tensor."""
        raise NotImplementedError


class ShardOfExperts(ExpertsShard):
    """Some of the experts, and one more without any block: for the tokens of all others."""

    def __init__(self, mesh: DeviceMesh, experts: int) -> None:
        super().__init__(mesh, 0)
        self.experts = experts // mesh.size() + 1

    def _divisions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        count = self._mesh.size()
        return (count * (self.experts - 1), 1), (count, 1)

    def check_sizes(self, layer: ExpertsLinear) -> None:
        """Raise InvalidArgumentError unless there are equally many experts for each process."""
        if layer.experts % self._mesh.size():
            raise InvalidArgumentError(
                f"module must have a multiple of {self._mesh.size()} experts, got {layer.experts}"
            )

    def entered(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return what all have, with this process's numbers of experts; the last stands for all others."""
        x, index, weights, experts = super().entered(x, index, weights)
        index = index - (experts - 1) * self._mesh.get_local_rank()
        own = (index >= 0) & (index < experts - 1)
        return x, torch.where(own, index, experts - 1), torch.where(own, weights, 0), experts

    def _cut(self, pattern: BlockPattern) -> BlockPattern:
        own = super()._cut(pattern)
        rows = own.shape[0] // (self.experts - 1) * self.experts
        blocks = torch.stack(own.block_indices(), 1)
        return BlockPattern.from_blocks(blocks, shape=(rows, own.shape[1]), block_shape=own.block_shape)

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self._own_rows(local_of(bias))

    def _own_rows(self, of_rows: Tensor) -> Tensor:
        return F.pad(of_rows.view(self.experts - 1, -1), (0, 0, 0, 1)).flatten()


class ShardOfRows(ExpertsShard):
    """Some rows of each expert: equal shares of its gate and its up, which are halves unless interleaved."""

    def __init__(self, mesh: DeviceMesh, experts: int, halves: int) -> None:
        super().__init__(mesh, 0)
        self.experts, self._halves = experts, halves

    @property
    def placement(self) -> Placement:
        """Whole: the rows of a process lie apart."""
        return Replicate()

    def check_sizes(self, layer: ExpertsLinear) -> None:
        """Raise InvalidArgumentError unless the features divide into shards of blocks."""
        features = layer.out_features // layer.experts // self._halves
        check_multiple(_BETWEEN, features, self._mesh, layer.block_shape[0])

    def _divisions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        count = self._mesh.size()
        return (count * self.experts, 1), (count, 1)

    def _unfolded(self, pattern: BlockPattern) -> BlockPattern:
        """Return a pattern whose rows, given shard by shard, lie expert by expert."""
        rows, columns = pattern.block_indices()
        own = pattern.grid[0] // (self.experts * self._halves * self._mesh.size())
        shard, rest = rows // (own * self.experts * self._halves), rows % (own * self.experts * self._halves)
        rows = (rest // own * self._mesh.size() + shard) * own + rest % own
        blocks = torch.stack((rows, columns), 1)
        return BlockPattern.from_blocks(blocks, shape=pattern.shape, block_shape=pattern.block_shape)

    def _along(self, pattern: BlockPattern) -> tuple[Tensor, int]:
        length = pattern.grid[0] // (self.experts * self._halves)
        return pattern.block_indices()[0] % length, length

    def _cut(self, pattern: BlockPattern) -> BlockPattern:
        count, rank = self._mesh.size(), self._mesh.get_local_rank()
        each, (position, length) = pattern.nnz // count, self._along(pattern)
        rows, columns = pattern.block_indices()
        own = length // count
        local = rows // length * own + position - rank * own
        blocks = torch.stack((local, columns), 1)[rank * each : (rank + 1) * each]
        shape = pattern.shape[0] // count, pattern.shape[1]
        return BlockPattern.from_blocks(blocks, shape=shape, block_shape=pattern.block_shape)

    def _bias(self, bias: Any) -> Tensor | None:
        if bias is None or not isinstance(bias, DTensor):
            return bias
        return self._own_rows(bias.to_local(grad_placements=[Partial()]))

    def _own_rows(self, of_rows: Tensor) -> Tensor:
        parts = of_rows.view(self.experts * self._halves, self._mesh.size(), -1)
        return parts[:, self._mesh.get_local_rank()].flatten()


class ShardOfColumns(ExpertsShard):
    """Some columns of every expert."""

    def __init__(self, mesh: DeviceMesh, experts: int) -> None:
        super().__init__(mesh, 1)
        self.experts = experts

    def _divisions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        count = self._mesh.size()
        return (self.experts, count), (1, count)

    def check_sizes(self, layer: ExpertsLinear) -> None:
        """Raise InvalidArgumentError unless the features divide into shards of blocks."""
        check_multiple(_BETWEEN, layer.in_features, self._mesh, layer.block_shape[1])

    def _bias(self, bias: Any) -> Tensor | None:
        if bias is None or not isinstance(bias, DTensor):
            return bias
        return added_once(bias, self._mesh)

    def _own_rows(self, of_rows: Tensor) -> Tensor:
        return of_rows
