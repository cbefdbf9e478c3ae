"""Tensor parallelism of block-sparse layers, and experts that several processes share; needs DTensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as _Colwise
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as _Rowwise
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from .._checks import Index, Operands, check_like_product, is_inside
from .._ops.autograd import autocast
from .._ops.epilogue import straight_through
from .._ops.products import linear_on
from .._runtime.device import exclusive
from .._runtime.pattern_cache import content_of
from ..errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from ..nn.experts import BlockSparseExperts, ExpertsLinear
from ..nn.linear import BlockSparseLinear, masked_linear
from ..nn.weight import Stored, StoredWeight, become, declare_shared, hold_shard, layer_index, stored_of
from ..pattern import BlockPattern, moved_index, overwrite_index
from ..storage.formats import STORED_NAMES
from .sync import broadcast_patterns

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PatternShard:
    """Some of the blocks of a weight, by their position along block rows (dim 0) or columns (dim 1).

    The pattern's buffers of a layer describe the whole weight, with slots in the order of the shards.
    """

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        self._mesh, self._dim = mesh, dim
        self._index: Index | None = None
        self._seen: tuple[object, int] | None = None  # what the layer's buffers held when it was made

    @property
    def parts(self) -> tuple[int, int]:
        """(r, c) as `BlockPattern.random` has them."""
        count = self._mesh.size()
        return (count, 1) if self._dim == 0 else (1, count)

    @property
    def placement(self) -> Placement:
        """Placement of the bias, and of scales that output features have."""
        return Shard(0) if self._dim == 0 else Replicate()

    def arrange(self, layer: Any, pattern: BlockPattern) -> None:
        """Give a layer this pattern, with slots in the order of the shards."""
        arranged, order = self.arranged(pattern), self.order(pattern)
        layer.pattern = arranged
        layer.weight = nn.Parameter(layer.weight.detach()[order], layer.weight.requires_grad)
        for name in stored_by_slots(layer):
            layer._buffers[name] = layer.get_buffer(name)[order]

    def check(self, pattern: BlockPattern) -> None:
        """Raise InvalidPatternError unless the blocks of each shard have the slots of its process."""
        shards = self._shard_of(pattern)
        count = self._mesh.size()
        if not torch.equal(shards, torch.arange(count, device="cpu").repeat_interleave(pattern.nnz // count)):
            raise InvalidPatternError(
                f"pattern must have its slots in the order of the layer's {count} shards, with "
                f"{pattern.nnz // count} blocks each; load other patterns before parallelize_module"
            )

    def arranged(self, pattern: BlockPattern) -> BlockPattern:
        """Return the same blocks with slots in the order of the shards.

        The order is the same for every number of processes, so a state dict of a few serves others.
        """
        counts = torch.bincount(self._shard_of(pattern), minlength=self._mesh.size()).tolist()
        if len(set(counts)) > 1:
            raise InvalidPatternError(
                f"pattern must have equally many blocks in each of the {len(counts)} shards of its block "
                f"{('rows', 'columns')[self._dim]}, got {counts}; make it with parts={self.parts}"
            )
        blocks = torch.stack(pattern.block_indices(), 1)[self.order(pattern)]
        return BlockPattern.from_blocks(blocks, shape=pattern.shape, block_shape=pattern.block_shape)

    def order(self, pattern: BlockPattern) -> Tensor:
        """Return, for every slot of the arranged pattern, the slot of its block in this one."""
        rows, columns = pattern.block_indices()
        position, _ = self._along(pattern)
        return ((position * pattern.grid[0] + rows) * pattern.grid[1] + columns).argsort()

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard."""
        nnz = like.col_indices.shape[0]
        return self.arranged(
            BlockPattern.random(
                like.shape, block_shape=like.block_shape, nnz=nnz, parts=self.parts, generator=generator
            )
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else it would be what it was when traced
    def index(self, layer: StoredWeight) -> Index:
        """Return the pattern of this process's blocks, kept in sync with the layer's."""
        whole = layer_index(layer)
        with exclusive():
            seen = content_of(whole)
            if self._index is None or self._seen != seen:
                self._index, self._seen = self._synced(whole), seen
            return self._index

    def _synced(self, index: Index) -> Index:
        pattern, device = BlockPattern.from_index(index).to("cpu"), index.col_indices.device
        self.check(pattern)
        cut = self._cut(pattern)
        mine = cut.index_on(cut.device)
        if self._index is None or self._index.col_indices.device != device:
            with torch.inference_mode(False):  # training may go on with it
                return moved_index(mine, device)
        overwrite_index(self._index, mine)  # in place, so that prepared plans stay valid
        return self._index

    def _cut(self, pattern: BlockPattern) -> BlockPattern:
        count, rank = self._mesh.size(), self._mesh.get_local_rank()
        each = pattern.nnz // count
        blocks = torch.stack(pattern.block_indices(), 1)[rank * each : (rank + 1) * each]
        blocks[:, self._dim] -= rank * (pattern.grid[self._dim] // count)
        shape = [size // part for size, part in zip(pattern.shape, self.parts, strict=True)]
        return BlockPattern.from_blocks(blocks, shape=shape, block_shape=pattern.block_shape)

    def _along(self, pattern: BlockPattern) -> tuple[Tensor, int]:
        """Return, for every slot, the position of its block along what is divided, and how long that is."""
        return pattern.block_indices()[self._dim], pattern.grid[self._dim]

    def _shard_of(self, pattern: BlockPattern) -> Tensor:
        """Return, for every slot, the shard that its block lies in."""
        position, length = self._along(pattern)
        return position.cpu() // (length // self._mesh.size())


def local_of(tensor: Any) -> Any:
    """Return this process's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Style:
    """The part of both styles that cuts a `BlockSparseLinear` along one dimension."""

    dim: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, BlockSparseLinear):
            return _parallelize(module, device_mesh, self)
        dense: Any = super()
        other: nn.Module = dense._apply(module, device_mesh)
        return other


class ColwiseParallel(_Style, _Colwise):
    """`torch.distributed.tensor.parallel.ColwiseParallel` that knows `BlockSparseLinear` as well.

    Every process gets equally many block rows of W, with equally many blocks in them. ``weight`` becomes a
    DTensor that is sharded by slots, and so do ``mask``, ``metadata`` and ``scales``; ``bias`` is sharded as
    that of a dense layer, and so are ``scales`` of output features. The buffers of the pattern go on to
    describe the whole W in every process, so a state dict is that of the whole layer. Slots are numbered
    anew, row by row.

    Everything else, and what it does for other modules, is as PyTorch documents it. Sequence parallelism is
    ``input_layouts=Shard(1)``.

    Raises:
        InvalidPatternError: the shards have different numbers of blocks, see ``parts`` of
            `BlockPattern.random`.
        UnsupportedError: the weight is not a plain parameter, for example because it is sharded already.
        UnsynchronizedPatternError: the processes have other numbers of blocks, or block shapes.
    """

    dim = 0


class RowwiseParallel(_Style, _Rowwise):
    """`torch.distributed.tensor.parallel.RowwiseParallel` that knows `BlockSparseLinear` as well.

    Every process gets equally many block columns of W, with equally many blocks in them; ``bias`` is
    replicated, and added once. With 8-bit activations every process quantizes its own features of x, and
    ``scales`` are replicated. Slots are numbered anew, column by column. Everything else is as in
    `ColwiseParallel`; sequence parallelism is ``output_layouts=Shard(1)``.

    Raises:
        InvalidArgumentError, InvalidPatternError, UnsupportedError: as `ColwiseParallel`, of columns.
    """

    dim = 1


class TensorShard(PatternShard):
    """The block rows (dim 0) or columns (dim 1) of a layer's weight that this process multiplies by."""

    def __init__(self, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__(mesh, style.dim)
        self._input_layouts, self._output_layouts = style.input_layouts, style.output_layouts
        self._use_local_output = style.use_local_output

    def linear(self, layer: BlockSparseLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the forward pass, with x in the style's input layout, and y in its output layout."""
        if getattr(layer.weight, "main_grad", None) is not None:
            raise UnsupportedError("main_grad needs the whole weight, got one sharded by tensor parallelism")
        if residual is not None:
            self._check_residual(residual)
            (residual,) = autocast(residual)
        local = self._input(x)
        weight, bias = local_of(layer.weight), self._bias(layer.bias)
        mask, metadata, scales = (local_of(layer._buffers[name]) for name in STORED_NAMES)
        index = self.index(layer)
        if mask is not None:
            how: Any = {"policy": layer.policy, "transposable": layer.transposable}
            y = masked_linear(local, weight, mask, index, bias, None, **how)
        else:
            fast = None if layer.activations is None else layer.use_fast_accum
            operands = Operands(metadata, scales, fast=fast)
            y = linear_on(local, weight, index, bias, policy=layer.policy, operands=operands)
        given = Shard(y.dim() - 1) if self._dim == 0 else Partial()
        whole = DTensor.from_local(y, self._mesh, [given], run_check=False)
        y = whole.redistribute(placements=self._output_layouts)
        y = y.to_local() if self._use_local_output else y
        return y if residual is None else y + check_like_product("residual", residual, y)

    def _check_residual(self, residual: Tensor) -> None:
        if isinstance(residual, DTensor) == self._use_local_output:
            raise InvalidArgumentError(
                f"residual must be a {'plain tensor' if self._use_local_output else 'DTensor'}, as the "
                f"output is with use_local_output={self._use_local_output}, got {type(residual).__name__}"
            )

    def _input(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self._mesh, self._input_layouts, run_check=False)
        if self._dim == 1:
            return x.redistribute(placements=[Shard(x.dim() - 1)]).to_local()
        # Every process has the gradient by its own rows of W alone.
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        if self._dim == 0 or not isinstance(bias, DTensor):
            return local_of(bias)  # type: ignore[no-any-return]
        # The first process adds it to its share of the sum; all have its gradient.
        whole = bias.to_local(grad_placements=[Replicate()])
        first = whole.new_full((), self._mesh.get_local_rank() == 0, dtype=torch.bool)
        return straight_through(whole, first)


def _parallelize(layer: BlockSparseLinear, mesh: DeviceMesh, style: Any) -> BlockSparseLinear:
    check_mesh(mesh)
    if isinstance(layer, ExpertsLinear):
        raise UnsupportedError(
            "ColwiseParallel and RowwiseParallel shard one weight for all tokens, got those of experts; give "
            "the experts themselves ExpertParallel"
        )
    name = ("out_features", "in_features")[style.dim]
    check_multiple(name, layer.spec.shape[style.dim], mesh, layer.block_shape[style.dim])
    check_plain(layer, mesh)
    # PyTorch 2.6 takes the first process always.
    share(layer, mesh, TensorShard(mesh, style), getattr(style, "src_data_rank", 0))
    return layer


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise InvalidArgumentError for a mesh of several dimensions."""
    if mesh.ndim != 1:
        raise InvalidArgumentError(f"device_mesh must have one dimension, got {mesh.ndim}; give mesh['name']")


def check_multiple(name: str, features: int, mesh: DeviceMesh, block: int) -> None:
    """Raise InvalidArgumentError unless features can be divided on boundaries of blocks."""
    count = mesh.size()
    if features % (count * block):
        raise InvalidArgumentError(
            f"{name} must be a multiple of {count} x {block}, for {count} processes on block boundaries, "
            f"got {features}"
        )


def check_plain(layer: StoredWeight, mesh: DeviceMesh) -> None:
    """Raise unless a layer has a plain weight, and blocks that can be divided."""
    if type(layer._parameters.get("weight")) is not nn.Parameter:
        raise UnsupportedError(
            f"parallelize_module needs a plain parameter as weight, got {type(layer.weight).__name__}; "
            "call it before fully_shard, and without parametrizations"
        )
    # If there is a pattern, all processes look at the same one later: none may leave the others waiting.
    if layer.weight.is_meta and len(layer.col_indices) % mesh.size():
        raise InvalidPatternError(
            f"pattern must have a number of blocks that is a multiple of {mesh.size()}, the number of "
            f"processes, got {len(layer.col_indices)}"
        )


def share(layer: Any, mesh: DeviceMesh, shard: PatternShard, source: int | None) -> None:
    """Shard a layer in place, once it is known that it can be sharded."""
    if not layer.weight.is_meta:
        layer.to(mesh.device_type)  # as PyTorch does with what it distributes
        pattern = layer.pattern
        if source is not None:
            group = mesh.get_group()
            (pattern,) = broadcast_patterns({"": layer}, group, dist.get_global_rank(group, source))
        shard.arrange(layer, pattern)
        if source is not None and mesh.size() == dist.get_world_size():
            declare_shared(layer)
    weight = _sharded_by_slots(layer.weight.detach(), mesh, source)
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    by_slots = stored_by_slots(layer)
    for name in STORED_NAMES:
        if name in by_slots:
            layer._buffers[name] = _sharded_by_slots(layer.get_buffer(name), mesh, source)
        elif layer._buffers[name] is not None:
            layer.scales = _distributed(layer.get_buffer(name), mesh, shard.placement, source)
    if layer.bias is not None:
        bias = _distributed(layer.bias.detach(), mesh, shard.placement, source)
        layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
    hold_shard(layer, shard)


def stored_by_slots(layer: Any) -> list[str]:
    """Return the names of what is stored for each block; with 8-bit activations scales are those of rows."""
    names = [name for name in STORED_NAMES if layer._buffers[name] is not None]
    rows = layer.activations is not None and "scales" in names and not is_inside(layer.get_buffer("scales"))
    return [name for name in names if name != "scales" or not rows]


def _sharded_by_slots(blocks: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor:
    """Shard blocks by slots; they are sent as bytes, since not every backend knows every dtype."""
    as_bytes = _distributed(blocks.contiguous().view(torch.uint8), mesh, Shard(0), source).to_local()
    return DTensor.from_local(as_bytes.view(blocks.dtype), mesh, [Shard(0)], run_check=False)


def _distributed(tensor: Tensor, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    """Distribute a tensor of one process; None: every process has the whole."""
    options = {} if source == 0 else {"src_data_rank": source}
    return distribute_tensor(tensor, mesh, [placement], **options)


class ExpertParallel(ParallelStyle):
    """A style of `parallelize_module` that divides `BlockSparseExperts` by their experts.

    Every process gets equally many experts. All processes compute with the same tokens, each with those that
    are routed to its own experts, and the results are summed: what others compute costs it no products.

    Every process keeps equally many blocks: experts that keep fewer get blocks of zeros, which are trained as
    others are. ``weight`` becomes a DTensor that is sharded by slots, and so do ``mask``, ``metadata`` and
    ``scales``; ``bias`` is sharded by experts. The buffers of the pattern describe all experts in every
    process, so a state dict is that of the whole layers.

    Raises:
        UnsupportedError: a weight is not a plain parameter, for example because it is sharded already.
        UnsynchronizedPatternError: the processes have other numbers of blocks, or block shapes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, BlockSparseExperts):
            raise InvalidArgumentError(
                f"ExpertParallel must be given BlockSparseExperts, got {type(module).__name__}"
            )
        check_mesh(device_mesh)
        if module.num_experts % device_mesh.size():
            raise InvalidArgumentError(
                f"module must have a multiple of {device_mesh.size()} experts, got {module.num_experts}"
            )
        layers = module.projections().values()
        for layer in layers:
            check_plain(layer, device_mesh)
        for layer in layers:
            shard = ExpertsShard(device_mesh, module.num_experts)
            share(layer, device_mesh, shard, getattr(self, "src_data_rank", 0))
        return module


class ExpertsShard(PatternShard):
    """This process's share of one projection: some experts, and one without a block for all other tokens.

    Attributes:
        experts: how many weights this process multiplies by, below each other.
    """

    def __init__(self, mesh: DeviceMesh, experts: int) -> None:
        super().__init__(mesh, 0)
        self.experts = experts // mesh.size() + 1

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
        bias = None if layer.bias is None else self._own_rows(local_of(layer.bias))
        return {"weight": local_of(layer.weight), "bias": bias, **found}

    def entered(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return tokens, their experts and weights as this process computes with them, and how many experts.

        All processes have the same tokens, and their gradients are sums over the processes. Experts have this
        process's numbers; the last one stands for all others.
        """
        x, weights = (
            DTensor.from_local(one, self._mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            for one in (x, weights)
        )
        last = self.experts - 1
        index = index - last * self._mesh.get_local_rank()
        own = (index >= 0) & (index < last)
        return x, torch.where(own, index, last), torch.where(own, weights, 0), self.experts

    def left(self, y: Tensor) -> Tensor:
        """Return the sum over all processes."""
        part = DTensor.from_local(y, self._mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    def random(self, like: Index, generator: torch.Generator | None) -> BlockPattern:
        """Return a random pattern of the whole weight, with equally many blocks in each shard.

        Experts have equally many, too, where the number of blocks allows it.
        """
        nnz, count = like.col_indices.shape[0], self._mesh.size()
        experts = count * (self.experts - 1)
        parts = (experts if nnz % experts == 0 else count), 1
        options: Any = {"block_shape": like.block_shape, "nnz": nnz, "generator": generator}
        return self.arranged(BlockPattern.random(like.shape, parts=parts, **options))

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

    def _cut(self, pattern: BlockPattern) -> BlockPattern:
        own = super()._cut(pattern)
        rows = own.shape[0] // (self.experts - 1) * self.experts
        blocks = torch.stack(own.block_indices(), 1)
        return BlockPattern.from_blocks(blocks, shape=(rows, own.shape[1]), block_shape=own.block_shape)

    def _own_rows(self, of_rows: Tensor) -> Tensor:
        return F.pad(of_rows.view(self.experts - 1, -1), (0, 0, 0, 1)).flatten()
