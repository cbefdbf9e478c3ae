"""Gradients of activations, and GLU gates, by the library's CUDA kernels."""

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES
from .device import on, run_on
from .layout import row_stride
from .private import current_device, current_stream

# Gradients of biases are taken together with others from this many elements on. With fewer, the host loses
# more time than the GPU saves.
MANY_ELEMENTS = 1 << 23
_GATED = (torch.float32, torch.float16, torch.bfloat16)


def activation_gradient(grad: Tensor, z: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of z and of the bias in z from that of activation(z).

    ``grad`` and ``z`` are contiguous, aligned, alike, and on a CUDA device.
    """
    features, dtype = z.shape[-1], DTYPES[z.dtype]
    tokens = z.numel() // features
    result, of_bias = torch.empty_like(z), z.new_empty(features)
    with on(z.device):
        workspace = z.new_empty(
            _C.activation_gradient_workspace_size(dtype, tokens, features), dtype=torch.uint8
        )
        _C.activation_gradient(
            dtype,
            activation,
            tokens,
            features,
            z.data_ptr(),
            grad.data_ptr(),
            result.data_ptr(),
            of_bias.data_ptr(),
            workspace.data_ptr(),
            workspace.numel(),
            current_stream(z.get_device()),
        )
    return result, of_bias


def gate(y: Tensor, by: Tensor | None, activation: int) -> Tensor:
    """Return y ⊙ activation(by), or that of the halves of y; `multiplies_by_gate` must hold."""
    tokens, features, gate_rows, rows = _operands(y, by)
    result = y.new_empty(*y.shape[:-1], features)
    run, stream = _C.gate, current_stream(y.get_device())
    if y.get_device() != current_device():
        run = run_on(y.device, run)
    code, here = DTYPES[y.dtype], (result.data_ptr(), features)
    run(code, activation, tokens, features, gate_rows, rows, here, stream)
    return result


def gate_gradient(
    grad: Tensor, y: Tensor, by: Tensor | None, activation: int
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and ``by`` from that of the result of `gate`, which is row-major."""
    tokens, features, gate_rows, rows = _operands(y, by)
    of_y, of_by = y.new_empty(y.shape), None if by is None else by.new_empty(by.shape)
    *_, of_gate, of_factor = _operands(of_y, of_by)
    run, stream = _C.gate_gradient, current_stream(y.get_device())
    if y.get_device() != current_device():
        run = run_on(y.device, run)
    stride = row_stride(grad)
    assert stride is not None
    given = grad.data_ptr(), stride
    run(DTYPES[y.dtype], activation, tokens, features, gate_rows, rows, given, of_gate, of_factor, stream)
    return of_y, of_by


def multiplies_by_gate(y: Tensor, by: Tensor | None) -> bool:
    """Return True if a kernel reads both in place, or without ``by`` the halves of y."""
    if not may_multiply_by_gate(y, 32 if by is None else 16) or row_stride(y) is None:
        return False
    return by is None or row_stride(by) is not None


def may_multiply_by_gate(y: Tensor, multiple: int) -> bool:
    """Return True if a kernel multiplies them once they are row-major with features of that multiple."""
    return y.is_cuda and y.dtype in _GATED and y.shape[-1] % multiple == 0


def _operands(y: Tensor, by: Tensor | None) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Return (tokens, features, rows of the gate, rows of the factor); rows: address, leading dimension."""
    stride, features, start = row_stride(y), y.shape[-1], y.data_ptr()
    assert stride is not None
    tokens = y.numel() // features
    if by is None:
        features //= 2
        return tokens, features, (start, stride), (start + features * y.itemsize, stride)
    gate_stride = row_stride(by)
    assert gate_stride is not None
    return tokens, features, (by.data_ptr(), gate_stride), (start, stride)
