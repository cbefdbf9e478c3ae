"""Norms of the blocks of dense gradients: where a block that is missing would help most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import checked
from .._checks import check_shapes
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ._layers import checked_choice, precision_of

NORMS = (1, 2, math.inf)
STRIP_BYTES = 64 << 20  # of the dense gradient that exist at once, unless one block row takes more


@checked
def block_gradient_norms(
    dy: Tensor, x: Tensor, block_shape: int | Sequence[int], *, norm: float = 1
) -> Tensor:
    """Return norms of all blocks of the gradient dyᵀ x of a dense W in y = x Wᵀ, kept or not.

    The gradient is computed as autograd would, in the dtype of dy, but a strip of block rows at a time: all
    of it never lies in memory, at most 64 MiB of it do, or one block row. Nothing waits for a GPU.

    Args:
        dy: [..., out_features], the gradient of y.
        x: [..., in_features], with the same leading dimensions.
        block_shape: (bn, bk), rows (out) and columns (in) of a block, or one number for both.
        norm: of a block: 1, the sum of magnitudes; 2, the Frobenius norm; or ``math.inf``, the largest
            magnitude.

    Returns:
        [out_features / bn, in_features / bk] float32, or float64 for float64.

    Raises:
        InvalidArgumentError: the shapes or devices do not fit each other or the block shape, or there is no
            such norm.
    """
    checked_choice("norm", norm, NORMS)
    for name, operand in (("dy", dy), ("x", x)):
        if operand.dim() == 0 or not operand.is_floating_point():
            raise InvalidArgumentError(
                f"{name} must be floating-point [..., features], got shape {tuple(operand.shape)} "
                f"of {operand.dtype}"
            )
    if dy.shape[:-1] != x.shape[:-1] or dy.device != x.device:
        raise InvalidArgumentError(
            f"dy must have the leading dimensions {tuple(x.shape[:-1])} of x, on {x.device}, got "
            f"{tuple(dy.shape[:-1])} on {dy.device}"
        )
    block_shape = check_shapes((dy.shape[-1], x.shape[-1]), block_shape)[1]
    with torch.no_grad():
        return _norms(dy, x, block_shape, norm)


def _norms(dy: Tensor, x: Tensor, block_shape: tuple[int, int], norm: float) -> Tensor:
    """The seam for a kernel that needs no strips."""
    bn, bk = block_shape
    precision = precision_of(dy)
    with torch.autocast(dy.device.type, enabled=False):
        x = x.reshape(-1, x.shape[-1]).to(dy.dtype)
        columns = dy.reshape(-1, dy.shape[-1]).t()
        rows = max(1, STRIP_BYTES // (bn * x.shape[1] * dy.itemsize)) * bn
        norms = []
        for strip in torch.split(columns, rows):
            blocks = (strip @ x).view(-1, bn, x.shape[1] // bk, bk)
            norms.append(torch.linalg.vector_norm(blocks, norm, dim=(1, 3), dtype=precision))
    return torch.cat(norms)


class _Observed(torch.autograd.Function):
    """y as it is. The norms come as the gradient of ``probe`` [R, C], a tensor of zeros.

    So autograd adds up what comes from several calls and several backward passes, computes nothing where it
    computes no gradients, and recomputes with activation checkpoints; compilers see a function without side
    effects.
    """

    @staticmethod
    def forward(y: Tensor, x: Tensor, probe: Tensor, block_shape: tuple[int, int], norm: float) -> Tensor:
        return y.detach()  # not a view for autograd, so that what follows may write to it in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, probe, *how = inputs
        ctx.save_for_backward(x)
        ctx.how, ctx.device = how, probe.device

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with torch.no_grad():  # also where gradients are differentiated once more
            norms = _norms(grads[0], x, *ctx.how)
        return grads[0], None, norms.to(ctx.device), None, None  # a model may be moved in between


_observed: Callable[..., Tensor] = _Observed.apply


class Observer:
    """Observer of the norms of a layer's dense gradient in the backward passes until `take`."""

    def __init__(self, layer: BlockSparseLinear, norm: float) -> None:
        (out_features, in_features), (bn, bk) = layer.spec.shape, layer.block_shape
        self._block_shape, self._norm = (bn, bk), norm
        self.probe = torch.zeros(
            out_features // bn,
            in_features // bk,
            dtype=precision_of(layer.weight),
            device=layer.weight.device,
            requires_grad=True,
        )

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y as it is; its gradient is observed where one is recorded."""
        if not torch.is_grad_enabled():
            return y
        return _observed(y, x, self.probe, self._block_shape, self._norm)

    def take(self) -> Tensor | None:
        """Return norms [R, C], added up over the backward passes; None if there was none."""
        return self.probe.grad
