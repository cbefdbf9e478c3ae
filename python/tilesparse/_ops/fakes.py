"""Fake implementations of the products, for tracers and compilers: checks, and results without contents."""

from functools import partial
from typing import Any

from torch import Tensor

from .._checks import (
    Index,
    check_dds,
    check_dense,
    check_feature_scales,
    check_nothing_added,
    check_quantized_dds,
    check_quantized_x,
    check_sdd,
    check_values,
)
from .._runtime.layout import empty, result_form
from .._runtime.native import DDS_NN, DDS_NT
from .schemas import DdsOptions


def dds_fake(op: int, source: Tensor, values: Tensor, index: Index, *options: Any) -> Tensor:
    bias, residual, activation, feature_major, metadata, scales, transposed, gate = DdsOptions(*options)
    if transposed:  # only sizes of the pattern are read here, so its tensors need not be transposed
        check_nothing_added(bias, residual, activation, gate)
        crow, col, slot, shape, block_shape = index
        index, op = Index(crow, col, slot, shape[::-1], block_shape[::-1]), DDS_NN - op
    name = "x" if op == DDS_NT else "y"
    check_dds(name, source, values, index, bias, residual, metadata, scales, gate)
    return empty(source, result_form(source, index.shape[op], feature_major))


dds_nt_fake = partial(dds_fake, DDS_NT)
dds_nn_fake = partial(dds_fake, DDS_NN)


def dds_nt_through_fake(x: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    check_values("values", values, index)
    bias, residual, activation, feature_major, compressed, metadata, *_ = rest
    return dds_nt_fake(x, compressed, index, bias, residual, activation, feature_major, metadata)


def dds_nt_quantized_fake(x: Tensor, values: Tensor, index: Index, *rest: Any) -> Tensor:
    bias, residual, _, feature_major, scales, gate, metadata, x_values, x_scales, _ = rest
    check_quantized_dds(x, values, index, bias, residual, scales, gate, metadata)
    check_quantized_x(x, x_values, x_scales, values.dtype, scales)
    return empty(x, result_form(x, index.shape[0], feature_major))


def row_scales_fake(scales: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_feature_scales(scales, index)
    return scales.new_empty(index.col_indices.shape[0], index.block_shape[0])


def sdd_tn_fake(y: Tensor, x: Tensor, index: Index, *_: object) -> Tensor:
    check_sdd(y, x, index)
    return x.new_empty(index.col_indices.shape[0], *index.block_shape)


def sdd_tn_with_bias_fake(y: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    return sdd_tn_fake(y, x, index), y.new_empty(index.shape[0])


def sdd_tn_into_fake(y: Tensor, x: Tensor, index: Index, out: Tensor, accumulate: bool) -> None:
    check_sdd(y, x, index, out)


def expand_fake(values: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_values("values", values, index)
    return values.new_empty(index.shape)


def gather_fake(dense: Tensor, _: None, index: Index, *__: object) -> Tensor:
    check_dense(dense, index)
    return dense.new_empty(index.col_indices.shape[0], *index.block_shape)
