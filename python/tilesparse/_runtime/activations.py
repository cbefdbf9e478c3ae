"""Gradients of activations, and GLU gates, by kernels for CUDA devices."""

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES
from .device import on, run_on
from .layout import row_pitch
from .private import current_device, current_stream

# Gradients of biases come with others where these have so many elements. Of fewer, what the GPU saves is not
# more than what the host takes longer.
MANY_ELEMENTS = 1 << 23
_GATED = (torch.float32, torch.float16, torch.bfloat16)


def activation_gradient(grad: Tensor, z: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """The gradient of z from that of its activation, and its sums over tokens, that of the bias in z.

    Both are contiguous, aligned, alike, and on a CUDA device.
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
    """y ⊙ activation(by), or of the halves of y, of what `multiplies_by_gate` says yes to."""
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
    """The gradients of y and ``by`` from that of what `gate` gives, which has rows as `row_pitch` reads."""
    tokens, features, gate_rows, rows = _operands(y, by)
    of_y, of_by = y.new_empty(y.shape), None if by is None else by.new_empty(by.shape)
    *_, of_gate, of_factor = _operands(of_y, of_by)
    run, stream = _C.gate_gradient, current_stream(y.get_device())
    if y.get_device() != current_device():
        run = run_on(y.device, run)
    pitch = row_pitch(grad)
    assert pitch is not None
    given = grad.data_ptr(), pitch
    run(DTYPES[y.dtype], activation, tokens, features, gate_rows, rows, given, of_gate, of_factor, stream)
    return of_y, of_by


def multiplies_by_gate(y: Tensor, by: Tensor | None) -> bool:
    """Whether a kernel reads them where they lie; of halves both in y."""
    if not may_multiply_by_gate(y, 32 if by is None else 16) or row_pitch(y) is None:
        return False
    return by is None or row_pitch(by) is not None


def may_multiply_by_gate(y: Tensor, multiple: int) -> bool:
    """Whether a kernel does, once they are row-major; ``multiple``: of which y's features are one."""
    return y.is_cuda and y.dtype in _GATED and y.shape[-1] % multiple == 0


def _operands(y: Tensor, by: Tensor | None) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """(tokens, features, rows of the gate, of the factor); rows are an address, and elements to the next."""
    pitch, features, start = row_pitch(y), y.shape[-1], y.data_ptr()
    assert pitch is not None
    tokens = y.numel() // features
    if by is None:
        features //= 2
        return tokens, features, (start, pitch), (start + features * y.itemsize, pitch)
    gate_pitch = row_pitch(by)
    assert gate_pitch is not None
    return tokens, features, (by.data_ptr(), gate_pitch), (start, pitch)
