"""Schemas of the operators ``torch.ops.tilesparse.*``.

A pattern is passed as its three tensors and two pairs of integers, so that a graph of these operators holds
its patterns, too. Index tensors on CUDA devices are taken as they are: `BlockPattern` checks
what is in them where it is made.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PATTERN = "Tensor crow_indices, Tensor col_indices, Tensor slot, int[2] shape, int[2] block_shape"
# Storage of values: metadata of 2:4, scales of 8 or 4 bits, and whether the values are those of the
# transposed weight.
_STORED = "Tensor? metadata=None, Tensor? scales=None, bool transposed=False"
LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
LIB.define(
    f"dds_nt(Tensor x, Tensor values, {_PATTERN}, Tensor? bias=None, Tensor? residual=None, "
    f"int activation=0, bool feature_major=False, {_STORED}, Tensor? gate=None) -> Tensor"
)
LIB.define(
    f"dds_nt_through(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "bool feature_major, Tensor compressed, Tensor metadata, Tensor? transposed, "
    "Tensor? transposed_metadata) -> Tensor"
)
LIB.define(
    f"dds_nt_quantized(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "bool feature_major, Tensor scales, Tensor? gate, Tensor? metadata, Tensor x_values, Tensor x_scales, "
    "bool fast) -> Tensor"
)
LIB.define(f"row_scales(Tensor scales, {_PATTERN}) -> Tensor")
LIB.define(f"dds_nn(Tensor y, Tensor values, {_PATTERN}, bool feature_major=False, {_STORED}) -> Tensor")
LIB.define(f"sdd_tn(Tensor y, Tensor x, {_PATTERN}) -> Tensor")
LIB.define(f"sdd_tn_with_bias(Tensor y, Tensor x, {_PATTERN}) -> (Tensor, Tensor)")
LIB.define(f"sdd_tn_into(Tensor y, Tensor x, {_PATTERN}, Tensor(a!) out, bool accumulate) -> ()")
# Tokens in groups, each with a weight of its own: offsets [groups + 1] say where they begin.
LIB.define(
    f"grouped_dds_nt(Tensor x, Tensor values, {_PATTERN}, Tensor? bias, Tensor? residual, int activation, "
    "Tensor offsets, Tensor? metadata, Tensor? scales, Tensor? gate) -> Tensor"
)
LIB.define(
    f"grouped_dds_nn(Tensor y, Tensor values, {_PATTERN}, Tensor offsets, Tensor? metadata, "
    "Tensor? scales) -> Tensor"
)
LIB.define(f"grouped_sdd_tn(Tensor y, Tensor x, {_PATTERN}, Tensor offsets) -> Tensor")
LIB.define("group_sums(Tensor y, Tensor offsets) -> Tensor")
# Tokens and their rows, which are in the order of groups: rows int64 [tokens, choices].
LIB.define("spread(Tensor x, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine(Tensor y, Tensor? weights, Tensor rows) -> Tensor")
LIB.define("combine_gradient(Tensor grad, Tensor y, Tensor? weights, Tensor rows) -> (Tensor, Tensor)")
LIB.define(f"expand(Tensor values, {_PATTERN}) -> Tensor")
LIB.define(f"gather(Tensor dense, {_PATTERN}) -> Tensor")
LIB.define("compress(Tensor values, Tensor mask, bool transposed=False) -> (Tensor, Tensor)")
# The dtype is its number in DTYPES or QUANTIZED: AOTInductor of PyTorch 2.11 hands operators another
# ScalarType.
LIB.define("expand_values(Tensor values, Tensor? metadata, Tensor? scales, int dtype) -> Tensor")
LIB.define("quantize(Tensor x, int dtype) -> (Tensor, Tensor)")
LIB.define("quantize_groups(Tensor x) -> (Tensor, Tensor)")
# Operators for compiled code: Inductor would write the gradients of the halves as two tensors.
LIB.define("gated_halves(Tensor y, int activation) -> Tensor")
LIB.define("gated_halves_gradient(Tensor grad, Tensor y, int activation) -> Tensor")


class DdsOptions(NamedTuple):
    """What dds_nt takes after its factors and the pattern, and dds_nn from feature_major on, without gate."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: int = 0
    feature_major: bool = False
    metadata: Tensor | None = None
    scales: Tensor | None = None
    transposed: bool = False
    gate: Tensor | None = None
