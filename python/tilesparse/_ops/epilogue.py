"""Operators around products: activations, bias gradients, GLU gates, masks, combined rows, quantization."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._checks import QUANTIZED, Index, is_regular, shown
from .._runtime import launch
from .._runtime.device import ACTIVATIONS
from .._runtime.layout import row_stride
from .._runtime.pattern_cache import prepared
from .._runtime.torch_private import current_stream, transforms_active, version
from ..errors import InvalidArgumentError
from .autograd import (
    by_number,
    is_plain,
    records_gradient,
    register,
    register_plainly,
    sdd_tn_with_bias_fake,
    transformable,
)

_BY_PYTORCH = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def _gradient_of_silu(grad: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return grad * sigmoid * (1 + z * (1 - sigmoid))


# Gradients of z from that of activation(z).
ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, z: grad,
    "relu": lambda grad, z: torch.ops.aten.threshold_backward(grad, z, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": _gradient_of_silu,
}


def activation_code(activation: str) -> int:
    """Return the number of an activation for operators."""
    try:
        return ACTIVATIONS[activation]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"activation must be one of {list(ACTIVATIONS)}, got {shown(activation)}"
        ) from None


def activated(y: Tensor, activation: str) -> Tensor:
    """Apply an activation by PyTorch."""
    return y if activation == "none" else _BY_PYTORCH[activation](y)


def bias_gradient(grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum the gradient of a product over tokens."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=dtype)


def weight_and_bias_gradients(grad: Tensor, x: Tensor, index: Index) -> tuple[Tensor, Tensor] | None:
    """Return both gradients from one pass over ``grad``, or None where each is computed by itself."""
    if not grad.is_cuda or transforms_active() or records_gradient((grad, x)):
        return None
    if not is_regular(index.shape, index.block_shape):
        return None
    if not is_plain((grad, x)):
        both: tuple[Tensor, Tensor] = _SDD_TN_WITH_BIAS(grad, x, *index)
        return both
    if grad.numel() >= launch.MANY_ELEMENTS:
        return launch.sdd_with_bias(grad, x, prepared(index))
    return None


_SDD_TN_WITH_BIAS = register("sdd_tn_with_bias", 2, launch.sdd_with_bias, sdd_tn_with_bias_fake)


def gated(y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """Multiply by a GLU gate whose shape was checked, see `functional.gated`."""
    given = (y,) if gate is None else (y, gate)
    if is_plain(given) and launch.multiplies_by_gate(y, gate):
        if not records_gradient(given):
            return launch.gate(y, gate, activation_code(activation))
        if gate is None or y.numel() >= launch.MANY_ELEMENTS:
            return _gate(y, gate, activation)
    if gate is None and is_compiling() and launch.may_multiply_by_gate(y, 32) and not transforms_active():
        halves: Tensor = _GATED_HALVES(y, activation_code(activation))
        return halves
    factor, by = _halves(y, gate)
    return factor * activated(by, activation)


def _halves(y: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factor and the gate."""
    if gate is not None:
        return y, gate
    by, factor = y.chunk(2, -1)
    return factor, by


class _Gated(torch.autograd.Function):
    """`gated`, which saves only its arguments; one pass computes both gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.activation = activation
        return launch.gate(y, gate, activation_code(activation))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (y, gate), grad = ctx.saved_tensors, grads[0]
        tensors = (grad, y) if gate is None else (grad, y, gate)
        if records_gradient(tensors) or not is_plain(tensors):
            return *_gate_gradients(grad, y, gate, ctx.activation), None
        return *launch.gate_gradient(_in_rows(grad), y, gate, activation_code(ctx.activation)), None


_gate: Callable[..., Tensor] = _Gated.apply


def _gate_gradients(
    grad: Tensor, y: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of y and the gate by PyTorch, so that they can be differentiated again."""
    factor, by = _halves(y, gate)
    of_factor = grad * activated(by, activation)
    of_gate = ACTIVATION_GRADIENTS[activation](grad * factor, by)
    return (torch.cat((of_gate, of_factor), -1), None) if gate is None else (of_factor, of_gate)


def _gated_halves(y: Tensor, code: int) -> Tensor:
    return launch.gate(_in_rows(y), None, code) if y.numel() else _gated_halves_fake(y, code)


def _gated_halves_gradient(grad: Tensor, y: Tensor, code: int) -> Tensor:
    if y.numel() == 0:
        return y.new_empty(y.shape)
    return launch.gate_gradient(_in_rows(grad), _in_rows(y), None, code)[0]


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if row_stride(tensor) is not None else tensor.clone(memory_format=torch.contiguous_format)


def _gated_halves_fake(y: Tensor, code: int) -> Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


def _gated_halves_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    y, ctx.code = inputs
    ctx.save_for_backward(y)


def _gated_halves_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    if records_gradient((grad, y)):
        return _gate_gradients(grad, y, None, list(ACTIVATIONS)[ctx.code])[0], None
    return _GATED_HALVES_GRADIENT(grad, y, ctx.code), None


_GATED_HALVES = register_plainly(
    "gated_halves",
    _gated_halves,
    _gated_halves_fake,
    ("CUDA",),
    (_gated_halves_backward, _gated_halves_context),
)
_GATED_HALVES_GRADIENT = register_plainly(
    "gated_halves_gradient", _gated_halves_gradient, lambda grad, y, code: y.new_empty(y.shape), ("CUDA",)
)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by bytes


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the weight with zeros where the mask has them, also in place of inf and nan."""
    if not (weight.is_cpu and weight.shape == mask.shape and is_plain((weight, mask))):
        return torch.where(mask, weight, 0)
    # On the CPU `where` takes fifteen times as long.
    word = _WORDS[weight.itemsize]
    return mask.to(word).neg_().bitwise_and_(weight.view(word)).view(weight.dtype)


class _StraightThrough(torch.autograd.Function):
    """The masked weight, with a straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        return masked(weight, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


straight_through: Callable[[Tensor, Tensor], Tensor] = _StraightThrough.apply


Weights = Tensor | None


def _keep(ctx: Any, inputs: tuple[Weights, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _of_combine(ctx: Any, grad: Tensor) -> tuple[Weights, ...]:
    y, weights, rows = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        return *_GRADIENT(grad, y, weights, rows), None
    return spread(grad, weights, rows), None, None


def _of_spread(ctx: Any, grad: Tensor) -> tuple[Weights, ...]:
    x, weights, rows = ctx.saved_tensors
    of_weights = _GRADIENT(x, grad, weights, rows)[1] if ctx.needs_input_grad[1] else None
    return combine(grad, weights, rows), of_weights, None


def _of_gradient(ctx: Any, of_y: Tensor, of_weights: Tensor) -> tuple[Weights, ...]:
    grad, y, weights, rows = ctx.saved_tensors
    return (
        combine(of_y, weights, rows) + combine(y, of_weights, rows),
        spread(grad, of_weights, rows),
        _GRADIENT(grad, of_y, weights, rows)[1] if ctx.needs_input_grad[2] else None,
        None,
    )


def _operator(
    name: str, kernel: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operator; return a call of it that passes by the dispatcher where only autograd acts."""
    op = register_plainly(name, kernel, fake, gradients=(backward, _keep))
    recorded = transformable(kernel, backward, _keep)
    transformed = transformable(op, backward, _keep)

    def run(*tensors: Weights) -> Any:
        if is_plain(tensors):
            return recorded(*tensors) if records_gradient(tensors) else kernel(*tensors)
        return transformed(*tensors) if transforms_active() else op(*tensors)

    return run


# Rows are int64 [tokens, choices], with each row of y or of the result once; weights [tokens, choices] have
# the dtype of the other operand, and None stands for ones.
# Σ_c weights[t, c] y[rows[t, c]] of y [tokens · choices, features]: [tokens, features].
combine: Callable[[Tensor, Weights, Tensor], Tensor] = _operator(
    "combine", launch.combine, launch.empty_combined, _of_combine
)
# Copies of each token of x [tokens, features]: row rows[t, c] of the result is weights[t, c] x[t].
spread: Callable[[Tensor, Weights, Tensor], Tensor] = _operator(
    "spread", launch.spread, launch.empty_spread, _of_spread
)
_GRADIENT = _operator(
    "combine_gradient", launch.combine_gradient, launch.empty_combine_gradient, _of_gradient
)


def quantized_for(weight: Tensor, x: Tensor, direct: bool, grouped: bool = False) -> tuple[Tensor, Tensor]:
    """Return x in the dtype of a weight that it is multiplied by, with scales; only to be read.

    Layers with one input share the result in eager mode: the last one of each thread is kept while x lives,
    and is found by the identity of x and PyTorch's count of writes to it. A weight that asks again begins a
    new pass, before which x may have been written to in a way that is not counted, as by the replay of a
    CUDA graph. Compiled graphs have one operator in the place of equal ones (`integrations.hooks`).
    ``direct``: whether `is_plain` holds for x; ``grouped``: whether 128 features of a token share a scale.
    """
    dtype = None if grouped else weight.dtype
    if not (direct or is_plain((x,), profiled=True)) or not (_counts_writes(x) or _last.constant is x):
        return quantized(x, dtype, direct)
    stream = current_stream(x.get_device()) if x.is_cuda else 0
    form = x.data_ptr(), x.shape, x.stride(), x.dtype
    key = version(x), form, dtype, stream, torch.is_inference_mode_enabled()
    holder, taker = _last.holder, weight.data_ptr()
    entry = holder[0]
    if entry is not None and entry.of() is x and entry.key == key and taker not in entry.takers:
        entry.takers.add(taker)
        return entry.result
    result = quantized(x, dtype, direct)
    holder[0] = _Entry(weakref.ref(x, lambda _: holder.__setitem__(0, None)), key, result, {taker})
    return result


def spread_in_8_bits(
    x: Tensor, given: Tensor, rows: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Quantize `spread` of x and ``given`` [tokens, choices], each token once; None where that is no use."""
    if not (is_compiling() or is_plain((x,))) or x.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        return None
    values, scales = quantized(x, dtype, is_plain((x,)))
    choices, every = rows.reshape(-1), torch.arange(rows.numel(), device=rows.device)
    choice = torch.empty_like(choices).scatter_(0, choices, every)  # of each row
    token = choice // rows.shape[1]
    words = values.view(torch.int64).index_select(0, token)  # several features at a time
    return words.view(dtype), scales.index_select(0, token) * given.reshape(-1).index_select(0, choice)


class constant:
    """Have layers share the quantization of an x that nothing writes to in this context.

    So they do in inference mode, where PyTorch counts no writes, and in a CUDA graph that is captured, whose
    replays must make everything they read: nothing is kept beyond the context then.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = None if _counts_writes(x) else x

    def __enter__(self) -> None:
        if self._x is not None:
            _last.holder[0], _last.constant = None, self._x

    def __exit__(self, *_: object) -> None:
        if self._x is not None:
            _last.holder[0] = _last.constant = None


class _Entry(NamedTuple):
    """A quantization: x, what it is found by, the result, and the addresses of the weights that have it."""

    of: Callable[[], Tensor | None]
    key: tuple[object, ...]
    result: tuple[Tensor, Tensor]
    takers: set[int]


class _Last(threading.local):
    """The last quantization of a thread, in a list, as another thread may be the one that drops x.

    Attributes:
        constant: what the context `constant` is about.
    """

    def __init__(self) -> None:
        self.holder: list[_Entry | None] = [None]
        self.constant: Tensor | None = None


_last = _Last()


def _counts_writes(x: Tensor) -> bool:
    """Return False where writes to x are not counted, or would not be in the replays of a captured graph."""
    return not x.is_inference() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


_KINDS: dict[Any, int] = {**QUANTIZED, None: 0}


def quantized(x: Tensor, dtype: torch.dtype | None, direct: bool) -> tuple[Tensor, Tensor]:
    """Quantize x by token, or without a dtype by groups of features."""
    if dtype not in _KINDS:
        raise InvalidArgumentError(f"dtype must be one of {list(QUANTIZED)}, got {dtype}")
    values, scales = launch.quantize(x, dtype) if direct else _QUANTIZE(x.detach(), _KINDS[dtype])
    return values, scales


_QUANTIZE = register_plainly(
    "quantize", by_number(launch.quantize, _KINDS), by_number(launch.empty_quantized, _KINDS)
)
