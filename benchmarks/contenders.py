"""Who is measured: this library, dense cuBLAS, PyTorch's Triton BSR and cuSPARSE's BSR, and STK.

A contender is prepared for a problem outside the measurement: patterns are converted, kernels compiled
and tuned, and what remains is a call with all arguments bound.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from harness import Timer, Unavailable
from problems import LAYOUTS, OPS, PRECISIONS, Problem
from torch import Tensor
from torch.nn import functional as F

from tilesparse import _C, BlockPattern, BlockSparseLinear, functional
from tilesparse._checks import DTYPES

TUNING_REPETITIONS = 5
STK_BLOCK = 128


class Prepared(NamedTuple):
    """A call that returns the result, and what to record about it."""

    call: Callable[[], Tensor]
    details: dict[str, Any]


Prepare = Callable[[Problem, Timer], Prepared]


def dense(problem: Problem) -> Callable[[], Tensor]:
    """The product with a dense weight, by cuBLAS."""
    x, y, weight = problem.x, problem.y, problem.weight
    if problem.case.op == "dds_nt":
        return lambda: F.linear(x, weight)
    if problem.case.op == "dds_nn":
        return lambda: y @ weight
    return lambda: y.t() @ x


def _tilesparse(problem: Problem, timer: Timer) -> Prepared:
    kernel = _chosen_kernel(problem)
    if not kernel.startswith(os.environ.get("TILESPARSE_KERNEL", "")):
        raise Unavailable(f"no kernel of that name computes this; {kernel} would")
    call = tilesparse_call(problem)
    call()
    return Prepared(call, {"kernel": kernel})


def tilesparse_call(problem: Problem) -> Callable[[], Tensor]:
    """The product by this library, by the kernel that it chooses."""
    x, y, values, pattern = problem.x, problem.y, problem.values, problem.pattern
    if problem.case.op == "dds_nt":
        return lambda: functional.linear(x, values, pattern)
    if problem.case.op == "dds_nn":
        return lambda: functional.dds(y, values, pattern, transpose=False)
    return lambda: functional.sdd(y, x, pattern)


def _packed(problem: Problem, timer: Timer) -> Prepared:
    """As in inference with a layer that keeps its weight packed, see `BlockSparseLinear.prepack`."""
    kernel = _chosen_kernel(problem)
    if "narrow" not in kernel or problem.case.op != "dds_nt":
        raise Unavailable(f"{kernel} takes the weight as it is")
    x, pattern = problem.x, problem.pattern
    sizes = pattern.in_features, pattern.out_features
    layer = BlockSparseLinear(*sizes, pattern=pattern, bias=False, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(problem.values)
    layer.prepack()
    return Prepared(torch.no_grad()(lambda: layer(x)), {"kernel": kernel})


def _chosen_kernel(problem: Problem) -> str:
    case = problem.case
    precision = PRECISIONS[case.precision]
    layout = LAYOUTS.index(case.x_layout)
    product = _C.Product(
        _C.Pattern(*problem.pattern.block_shape, *problem.pattern.shape, problem.pattern.nnz, 0, 0, 0),
        OPS.index(case.op),
        DTYPES[precision.dtype],
        1,
        case.shape.tokens,
        precision=int(case.precision == "tf32"),
        x_layout=layout if case.op != "dds_nn" else 0,
        y_layout=layout if case.op != "dds_nt" else 0,
    )
    return _C.kernels()[product.select(_C.device_info(1))[0]].name


def _triton(problem: Problem, timer: Timer) -> Prepared:
    """PyTorch's Triton kernels for BSR matrices, as ``F.linear`` with a BSR weight calls them.

    They have no product with the transposed weight: dgrad gets the blocks of Wᵀ, copied and sorted
    ahead of the measurement, which training would have to do in every step.
    """
    importlib.import_module("triton")  # without it PyTorch's module imports and fails later, obscurely
    triton_ops = importlib.import_module("torch.sparse._triton_ops")
    x, y, pattern, values = problem.x, problem.y, problem.pattern, problem.values
    if problem.case.op == "sdd_tn":
        sampled = _bsr(pattern, values)
        return Prepared(
            lambda: _tensor(triton_ops.sampled_addmm(sampled, y.t(), x, beta=0.0, skip_checks=True).values()),
            {},
        )
    if problem.case.op == "dds_nt":
        weight, activations = _bsr(pattern, values), x
    else:
        weight, activations = _bsr(pattern.transpose(), values.transpose(1, 2)), y
    tokens, features = len(activations), weight.shape[0]

    def call(meta: dict[str, int]) -> Tensor:
        out = activations.new_empty(tokens, features)
        triton_ops.bsr_dense_addmm(out.t(), weight, activations.t(), beta=0, out=out.t(), meta=meta)
        return out

    meta = _tuned(call, _triton_settings(tokens, max(pattern.block_shape)), timer)
    return Prepared(functools.partial(call, meta), {"meta": meta})


def _cusparse_bsr(problem: Problem, timer: Timer) -> Prepared:
    """cuSPARSE's BSR, as PyTorch multiplies it."""
    if problem.case.op != "dds_nt":
        raise Unavailable("multiplies x by the transposed weight only")
    weight, x = _bsr(problem.pattern, problem.values), problem.x
    return Prepared(lambda: _tensor(weight @ x.t()).t(), {})


def _bsr(pattern: BlockPattern, values: Tensor) -> Tensor:
    slot = pattern.slot.long().to(values.device)
    row_ptr, col_idx = pattern.crow_indices.to(values.device), pattern.col_indices.to(values.device)
    blocks = values[slot].contiguous()
    return torch.sparse_bsr_tensor(row_ptr, col_idx, blocks, size=pattern.shape, check_invariants=False)


def _triton_settings(tokens: int, block: int) -> list[dict[str, int]]:
    """Up to nine: the three widest tiles of at most 256 tokens, each with three pipelines."""
    tiles = [tile for tile in (256, 128, 64, 32, 16) if tokens % tile == 0][:3]
    pipelines = ((2, 8), (3, 4), (3, 8)) if block >= 64 else ((3, 4), (5, 4), (4, 8))
    return [
        {"SPLIT_N": tokens // tile, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": warps}
        for tile, (stages, warps) in itertools.product(tiles, pipelines)
    ]


def _tuned(
    call: Callable[[dict[str, int]], Tensor], settings: Sequence[dict[str, int]], timer: Timer
) -> dict[str, int]:
    """The fastest of the settings; those the GPU has too little memory for are passed over."""
    times: list[tuple[float, int]] = []
    failure = "the number of tokens is not a multiple of 16"
    for index, meta in enumerate(settings):
        bound = functools.partial(call, meta)
        try:
            bound()
            times.append((timer.microseconds(bound, TUNING_REPETITIONS), index))
        except Exception as error:  # Triton has no common base class for them
            failure = f"{type(error).__name__}: {error}"
    if not times:
        raise Unavailable(failure)
    return settings[min(times)[1]]


def _stk(problem: Problem, timer: Timer) -> Prepared:
    """STK of Gale et al., "MegaBlocks" (MLSys 2023)."""
    if problem.pattern.block_shape != (STK_BLOCK, STK_BLOCK):
        raise Unavailable(f"has blocks of {STK_BLOCK}x{STK_BLOCK} only")
    stk = importlib.import_module("stk")
    x, y, pattern = problem.x, problem.y, problem.pattern
    rows, cols = (index.int().cuda() for index in pattern.block_indices())  # its own int16 overflows
    weight = stk.Matrix(pattern.shape, problem.values, rows, cols, pattern.crow_indices.cuda())
    if problem.case.op == "dds_nt":
        transposed = weight.t()
        return Prepared(lambda: _tensor(stk.ops.dds(x, transposed)), {})
    if problem.case.op == "dds_nn":
        return Prepared(lambda: _tensor(stk.ops.dds(y, weight)), {})
    return Prepared(lambda: _tensor(stk.ops.sdd(y.t(), x, weight).data), {})


def _tensor(result: Any) -> Tensor:
    tensor: Tensor = result
    return tensor


CONTENDERS: dict[str, Prepare] = {
    "tilesparse": _tilesparse,
    "packed": _packed,
    "triton": _triton,
    "stk": _stk,
    "bsr": _cusparse_bsr,
}
