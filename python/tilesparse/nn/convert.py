"""Conversions of layers: from and to dense ones, from a spec, from one storage to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .._checks import DTYPES, Index, check_block_shape, check_shapes
from .._reports import empty_of, warn_user
from .._runtime.indices import blocks_of
from .._runtime.private import refuse_fakes, with_normal_tensors
from ..config import LayerSpec, check_nm, check_quantized_activations, check_storage
from ..errors import InvalidArgumentError, UnsupportedError
from ..matrix import BlockSparseMatrix
from ..pattern.block_pattern import BlockPattern
from ..pattern.choosing import check_parts_beside
from ..storage.registry import storage_of
from .tensors import is_sharded

if TYPE_CHECKING:
    from .linear import BlockSparseLinear
    from .stored import StoredWeight

_Layer = TypeVar("_Layer", bound="BlockSparseLinear")


@with_normal_tensors
def from_spec(
    cls: type[_Layer], spec: LayerSpec, bias: bool, device: torch.device | str | int | None
) -> _Layer:
    """Return a layer of this spec without contents, see `BlockSparseLinear.from_spec`."""
    if (spec.experts is not None) != cls.of_experts:
        raise InvalidArgumentError(f"spec.experts must fit {cls.__name__}, got {spec.experts}")
    own: Any = {} if spec.experts is None else {"experts": spec.experts}
    sizes = spec.grid[0] + 1, spec.nnz, spec.nnz
    crow, col, slot = (torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)
    layer = cls(
        spec.shape[1],
        spec.shape[0],
        bias,
        pattern=BlockPattern.from_index(Index(crow, col, slot, spec.shape, spec.block_shape)),
        policy=spec.policy,
        nm=spec.nm,
        transposable=spec.transposable,
        device="meta",
        dtype=spec.dtype,
        **own,
    ).to_storage(spec.storage, per=spec.scales or "row", activations=spec.activations)
    device = torch.empty(0, device=device).device
    return layer if device.type == "meta" else layer.to_empty(device=device)


@with_normal_tensors
def from_linear(
    cls: type[_Layer],
    linear: nn.Module,
    density: float,
    *,
    block_shape: Any,
    pattern: BlockPattern | None,
    scores: Tensor | None,
    parts: tuple[int, int],
    storage: str,
    activations: str | None,
    **options: Any,
) -> _Layer:
    """Return a layer with the best blocks of a dense one, see `BlockSparseLinear.from_linear`."""
    refuse_fakes("a layer")
    if not isinstance(linear, nn.Linear) and not is_conv1d(linear):
        raise InvalidArgumentError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
    dense: Any = linear
    reason = reason_not_dense(dense.weight)
    if reason is not None:
        raise InvalidArgumentError(f"linear must have a weight that can be read: {reason}")
    weight, bias, nm = dense_weight(dense), dense.bias, options["nm"]
    parts = check_parts_beside(pattern, parts)
    if pattern is None:
        pattern = best_blocks(weight, scores, density, check_block_shape(block_shape), parts)
        _warn_of_empty(pattern)
    check_nm(nm, options["transposable"])
    check_storage(storage, nm)
    check_quantized_activations(activations, storage)
    (out_features, in_features), has_bias = weight.shape, bias is not None
    options |= {"pattern": pattern, "device": "meta", "dtype": weight.dtype}
    layer = cls(in_features, out_features, has_bias, **options).to_empty(device=weight.device)
    layer.pattern = pattern
    on_device = pattern.to(weight.device)
    with torch.no_grad():
        layer.weight.copy_(BlockSparseMatrix.from_dense(weight, on_device).values)
        layer.weight.requires_grad_(dense.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.copy_(bias)
            layer.bias.requires_grad_(bias.requires_grad)
        if nm is not None and not weight.is_meta:
            by_weight = scores if scores is not None and scores.shape == weight.shape else weight.abs()
            layer.update_mask_(BlockSparseMatrix.from_dense(by_weight, on_device).values)
    layer.to_storage(storage, activations=activations).train(linear.training)
    return layer


def _warn_of_empty(pattern: BlockPattern) -> None:
    rows, columns = empty_of(pattern.block_indices(), pattern.shape, pattern.block_shape)
    if pattern.nnz and (rows or columns):
        warn_user(
            f"the blocks that were chosen leave {rows} block rows (outputs that are the bias alone) "
            f"and {columns} block columns (inputs that nothing reads) empty"
        )


def best_blocks(
    weight: Tensor,
    scores: Tensor | None,
    density: float,
    block_shape: tuple[int, int],
    parts: tuple[int, int],
) -> BlockPattern:
    """Return the pattern of the blocks with the highest scores, by default their Frobenius norms."""
    if weight.is_meta and scores is None:
        raise InvalidArgumentError(
            "linear must not be on the meta device, where there is nothing to score; give pattern"
        )
    if scores is None:
        if bool(weight.isnan().any()):
            raise InvalidArgumentError(
                "linear must not hold NaN in its weight, which cannot be ranked; give pattern"
            )
        return BlockPattern.from_dense(weight, block_shape=block_shape, density=density, parts=parts)
    grid = check_shapes(weight.shape, block_shape)[2]
    if scores.shape == weight.shape:
        precision = torch.promote_types(scores.dtype, torch.float32)
        scores = blocks_of(scores, block_shape).sum((2, 3), dtype=precision)
    if scores.shape != grid:
        raise InvalidArgumentError(
            f"scores must have shape {grid} or {tuple(weight.shape)}, got {tuple(scores.shape)}"
        )
    return BlockPattern.from_scores(scores, block_shape=block_shape, density=density, parts=parts)


def to_linear(layer: BlockSparseLinear) -> nn.Linear:
    """Return the dense layer with the same weight, zero where no block is kept."""
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    dense = BlockSparseMatrix(layer.plain_values(), layer.pattern).to_dense()
    linear.weight = nn.Parameter(dense, layer.weight.requires_grad)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return linear.train(layer.training)


def to_semi_structured(layer: BlockSparseLinear) -> Tensor:
    """Return the weight as PyTorch's 2:4 tensor, see `BlockSparseLinear.to_semi_structured`."""
    if layer.nm is None or layer.density < 1:
        raise UnsupportedError(
            f"to_semi_structured needs 2:4 with every block kept, got nm={layer.nm} with density "
            f"{layer.density:.4g}"
        )
    try:
        return torch.sparse.to_sparse_semi_structured(to_linear(layer).weight.detach())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedError(
            f"to_semi_structured: PyTorch cannot represent this weight: {error}"
        ) from error


def convert_storage(
    layer: StoredWeight, spec: LayerSpec, limits: Tensor | None = None, values: Tensor | None = None
) -> float:
    """Store a layer's weight as a spec says that differs in nothing else; return the relative error."""
    storage = storage_of(spec.storage)
    for name, given in (("limits", limits), ("values", values)):
        if given is not None and not storage.scales:
            raise InvalidArgumentError(
                f"{name} must be None with storage {spec.storage!r}, which has no scales"
            )
    if values is not None and values.shape != (spec.nnz, *spec.block_shape):
        raise InvalidArgumentError(
            f"values must be {[spec.nnz, *spec.block_shape]}, as the blocks of the layer, got "
            f"{list(values.shape)}"
        )
    if layer.weight.is_meta:
        layer.allocate(spec, layer.weight.device)
        return layer.storage_error
    blocks = layer.plain_values()
    pattern = None if spec.activations is None else layer.pattern
    given = blocks if values is None else values.to(blocks.device)
    layer.assign(spec, storage.store(given, layer.kept_mask(), spec, pattern, limits))
    norm = torch.linalg.vector_norm(blocks, dtype=torch.float64)
    lost = torch.linalg.vector_norm(layer.plain_values().double() - blocks.double())
    return float(lost / norm) if float(norm) > 0 else 0.0


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' Conv1D, a linear layer with weight [in_features, out_features]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def dense_weight(linear: Any) -> Tensor:
    """Return W [out_features, in_features] of a dense layer without gradient: a view, or a copy.

    It is a copy of weights that `is_stored_otherwise`, in the dtype of the bias or PyTorch's default if they
    have 8 bits.
    """
    weight: Tensor = linear.weight.detach()
    if is_stored_otherwise(weight):
        weight = weight.to_dense() if weight.layout != torch.strided or _is_two_of_four(weight) else weight
        dtype = torch.get_default_dtype() if linear.bias is None else linear.bias.dtype
        weight = weight.to(dtype) if weight.dtype in _FLOAT8 else weight
    return weight.T if is_conv1d(linear) else weight


_SPARSE = (torch.sparse_bsr, torch.sparse_csr, torch.sparse_bsc, torch.sparse_csc, torch.sparse_coo)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def is_stored_otherwise(weight: Tensor) -> bool:
    """Return True for a weight that is no plain tensor, or not of a dtype that layers have."""
    plain = type(weight.detach()) is Tensor or is_sharded(weight)
    return not plain or weight.layout != torch.strided or weight.dtype not in DTYPES


def reason_not_dense(weight: Tensor) -> str | None:
    """Say why a weight that `is_stored_otherwise` has no dense form that is known here, or return None."""
    if not is_stored_otherwise(weight):
        return None
    kind = type(weight.detach())
    if kind is not Tensor and not is_sharded(weight) and not _is_two_of_four(weight):
        return f"its weight is a {kind.__module__}.{kind.__name__}; make it a plain tensor first"
    if weight.layout not in (torch.strided, *_SPARSE):
        return f"its weight has the layout {weight.layout}; make it dense first"
    if weight.dtype not in (*DTYPES, *_FLOAT8):
        return f"its weight is {weight.dtype}, for which there are no sparse layers"
    return None


def _is_two_of_four(weight: Tensor) -> bool:
    return isinstance(weight, torch.sparse.SparseSemiStructuredTensor)
