"""Sparse layers made of dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .._checks import check_block_shape
from ..errors import InvalidArgumentError
from ..nn.convert import best_blocks, dense_weight, is_conv1d
from ..nn.experts import BlockSparseExperts
from ..nn.known_experts import Projections, projections_of
from ..nn.linear import BlockSparseLinear
from ..nn.reference import PseudoBlockSparseLinear
from ..storage.registry import storage_of
from .modules import Replacement
from .rules import LayerOptions


class CannotBeCutError(InvalidArgumentError):
    """A weight's shape is no multiple of the block shape."""


def sparse_layer(module: nn.Module, options: LayerOptions) -> Replacement:
    """Return the block-sparse layer, or experts, that replace dense ones, which stay as they are.

    Raises:
        CannotBeCutError: the weight cannot be cut into blocks of the config's shape.
        InvalidArgumentError: the weight has NaN, has infinities and is to be stored in 8 or 4 bits, is on the
            meta device without a pattern, or does not have the pattern's shape.
    """
    config, pattern = options.config, options.pattern
    projections = projections_of(module)
    if projections is not None:
        return _sparse_experts(module, projections, options)
    if isinstance(module, nn.Linear) or is_conv1d(module):
        if pattern is None:  # chosen here, as the report names what that leaves empty
            block_shape = check_block_shape(config.block_shape)
            check_blocks_can_be_chosen(module, block_shape)
            weight = dense_weight(module)
            pattern = best_blocks(weight, None, config.density, block_shape, options.parts)
        _check_can_be_stored(dense_weight(module), config.storage)
    layer = BlockSparseLinear.from_linear(
        module, pattern=pattern, policy=config.policy, nm=config.nm, transposable=config.transposable
    ).to_storage(config.storage, per=config.scales, activations=config.activations)
    return PseudoBlockSparseLinear(layer) if options.pseudo_linear else layer


def _sparse_experts(module: nn.Module, projections: Projections, options: LayerOptions) -> BlockSparseExperts:
    config = options.config
    block_shape = check_block_shape(config.block_shape)
    for name in projections.names():
        weight = module.get_parameter(name)
        rows, columns = (-1, -2) if projections.transposed else (-2, -1)
        _check_can_be_cut((weight.shape[rows], weight.shape[columns]), block_shape)
        _check_can_be_ranked(weight)
        _check_can_be_stored(weight, config.storage)
    return BlockSparseExperts.from_experts(
        module,
        config.density,
        block_shape=block_shape,
        parts=options.parts,
        nm=config.nm,
        transposable=config.transposable,
        storage=config.storage,
        scales=config.scales,
    )


def check_blocks_can_be_chosen(module: Any, block_shape: Sequence[int]) -> None:
    """Raise CannotBeCutError unless the blocks of a dense layer can be ranked."""
    _check_can_be_cut(dense_weight(module).shape, block_shape)
    _check_can_be_ranked(dense_weight(module))


def _check_can_be_cut(shape: Sequence[int], block_shape: Sequence[int]) -> None:
    for name, size, block in zip(("out_features", "in_features"), shape, block_shape, strict=True):
        if size % block:
            raise CannotBeCutError(
                f"block_shape must divide the weight, got {tuple(block_shape)}: {name} is {size}, "
                f"no multiple of {block}"
            )


def _check_can_be_ranked(weight: Tensor) -> None:
    if weight.is_meta:
        raise InvalidArgumentError(
            "pattern must be given on the meta device: it has no weights to rank blocks by"
        )
    if bool(weight.isnan().any()):
        raise InvalidArgumentError("its weight must not have NaN, which cannot be ranked")


def _check_can_be_stored(weight: Tensor, storage: str) -> None:
    if storage_of(storage).needs_finite and not weight.is_meta and not bool(weight.isfinite().all()):
        raise InvalidArgumentError(f"its weight must be finite for the storage {storage!r}, got inf or nan")
