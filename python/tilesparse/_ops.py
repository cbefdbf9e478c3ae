"""The operators ``torch.ops.tilesparse.*``: schemas, checks, kernels and fakes.

A pattern travels as its ``handle`` and ``version``, two integers, so that compiled graphs can hold it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autograd import with_autograd
from .errors import InvalidArgumentError, PatternChangedError
from .pattern import INT32_MAX, BlockPattern, lookup

DDS_NT, DDS_NN, SDD_TN = range(3)
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}

_ALIGNMENT = 16  # bytes, of every operand and leading dimension on CUDA devices

LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
LIB.define(
    "dds_nt(Tensor x, Tensor values, Tensor? bias, int handle, int version, "
    "int activation=0, bool feature_major=False) -> Tensor"
)
LIB.define("dds_nn(Tensor y, Tensor values, int handle, int version, bool feature_major=False) -> Tensor")
LIB.define("sdd_tn(Tensor y, Tensor x, int handle, int version) -> Tensor")
LIB.define("sdd_tn_into(Tensor y, Tensor x, Tensor(a!) out, int handle, int version, bool accumulate) -> ()")

_forced_kernel = 0


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Within it every product runs on the named kernel of ``_C.kernels()``, or raises."""
    global _forced_kernel
    names = [kernel.name for kernel in _C.kernels()]
    if name not in names:
        raise InvalidArgumentError(f"name: one of {names} expected, got {name!r}")
    before, _forced_kernel = _forced_kernel, names.index(name) + 1
    try:
        yield
    finally:
        _forced_kernel = before


def _dds_nt(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    handle: int,
    version: int,
    activation: int = 0,
    feature_major: bool = False,
) -> Tensor:
    pattern = _current(handle, version)
    _check_dds(pattern, "x", x, pattern.in_features, values, bias)
    source = _operand("x", x)
    y = _empty(x, pattern.out_features, feature_major)
    _launch(pattern, DDS_NT, source, _result(y, source[1], feature_major), _aligned(values), bias, activation)
    return y


def _dds_nn(y: Tensor, values: Tensor, handle: int, version: int, feature_major: bool = False) -> Tensor:
    pattern = _current(handle, version)
    _check_dds(pattern, "y", y, pattern.out_features, values)
    source = _operand("y", y)
    x = _empty(y, pattern.in_features, feature_major)
    _launch(pattern, DDS_NN, _result(x, source[1], feature_major), source, _aligned(values))
    return x


def _sdd_tn(y: Tensor, x: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    out = x.new_empty(pattern.prepared.values_shape)
    _launch(pattern, SDD_TN, _operand("x", x), _operand("y", y), out)
    return out


def _sdd_tn_into(y: Tensor, x: Tensor, out: Tensor, handle: int, version: int, accumulate: bool) -> None:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    _check_values("out", out, pattern, "x", x)
    for name, operand in (("y", y), ("x", x)):
        if _overlap(operand, out):
            raise InvalidArgumentError(f"out: must not share memory with {name}")
    if out.is_cuda and out.data_ptr() % _ALIGNMENT:
        raise InvalidArgumentError(f"out: must be aligned to {_ALIGNMENT} bytes")
    _launch(pattern, SDD_TN, _operand("x", x), _operand("y", y), out, accumulate=accumulate)


def _current(handle: int, version: int) -> BlockPattern:
    pattern = lookup(handle)
    if pattern.version != version:
        raise PatternChangedError(
            f"version: the pattern was updated since this product was recorded "
            f"(version {version} expected, it now has {pattern.version})"
        )
    return pattern


def _check_dds(
    pattern: BlockPattern,
    name: str,
    matrix: Tensor,
    features: int,
    values: Tensor,
    bias: Tensor | None = None,
) -> None:
    _check_activations(name, matrix, features)
    _check_values("values", values, pattern, name, matrix)
    if bias is not None:
        if bias.shape != (pattern.out_features,):
            raise InvalidArgumentError(
                f"bias: shape ({pattern.out_features},) expected, got {tuple(bias.shape)}"
            )
        _check_alike("bias", bias, name, matrix)


def _check_sdd(pattern: BlockPattern, y: Tensor, x: Tensor) -> None:
    _check_activations("x", x, pattern.in_features)
    _check_activations("y", y, pattern.out_features)
    if y.shape[:-1] != x.shape[:-1]:
        raise InvalidArgumentError(
            f"y: the leading dimensions {tuple(x.shape[:-1])} of x expected, got {tuple(y.shape[:-1])}"
        )
    _check_alike("y", y, "x", x)


def _check_activations(name: str, matrix: Tensor, features: int) -> None:
    shape = matrix.shape
    if not shape or shape[-1] != features:
        raise InvalidArgumentError(f"{name}: last dimension {features} expected, got shape {tuple(shape)}")
    if matrix.dtype not in DTYPES:
        raise InvalidArgumentError(f"{name}: dtype {_names(DTYPES)} expected, got {matrix.dtype}")


def _check_values(name: str, values: Tensor, pattern: BlockPattern, like_name: str, like: Tensor) -> None:
    expected = pattern.prepared.values_shape
    if values.shape != expected or not values.is_contiguous():
        raise InvalidArgumentError(
            f"{name}: a contiguous tensor [nnz, bn, bk] = {list(expected)} expected, "
            f"got shape {list(values.shape)} with strides {values.stride()}"
        )
    _check_alike(name, values, like_name, like)


def _check_alike(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise InvalidArgumentError(f"{name}: dtype {like.dtype} of {like_name} expected, got {tensor.dtype}")
    if tensor.device != like.device:
        raise InvalidArgumentError(
            f"{name}: device {like.device} of {like_name} expected, got {tensor.device}"
        )


def _names(dtypes: dict[torch.dtype, int]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _empty(like: Tensor, features: int, feature_major: bool) -> Tensor:
    """An uninitialised [..., features] beside ``like`` [..., other features]."""
    shape = (*like.shape[:-1], features)
    if not feature_major:
        return like.new_empty(*shape)  # a sequence takes longer to parse
    tokens = 1
    for size in shape[:-1]:
        tokens *= size
    ld = tokens
    if like.is_cuda:
        step = _ALIGNMENT // like.itemsize
        ld = (tokens + step - 1) // step * step
    return like.new_empty_strided((tokens, features), (1, ld)).view(shape)


Operand = tuple[Tensor, int, int, int]  # the memory, tokens, ld, layout


def _operand(name: str, matrix: Tensor) -> Operand:
    """Activations as the library takes them; a copy where their strides or alignment do not fit."""
    if matrix.dim() != 2:
        matrix = matrix.reshape(-1, matrix.shape[-1])
    tokens, features = matrix.shape
    if tokens > INT32_MAX:
        raise InvalidArgumentError(f"{name}: fewer than 2^31 tokens expected, got {tokens}")
    token_stride, feature_stride = matrix.stride()
    if tokens == 0 or (feature_stride == 1 and (tokens == 1 or token_stride >= features)):
        ld, layout = (token_stride if tokens > 1 else features), 0
    elif (token_stride == 1 or tokens == 1) and feature_stride >= tokens:
        ld, layout = feature_stride, 1
    else:
        return _dense(matrix), tokens, features, 0
    if matrix.is_cuda and (matrix.data_ptr() | ld * matrix.itemsize) % _ALIGNMENT:
        return _dense(matrix), tokens, features, 0
    return matrix, tokens, ld, layout


def _result(matrix: Tensor, tokens: int, feature_major: bool) -> Operand:
    """What `_empty` made, of any dimensions."""
    return matrix, tokens, matrix.stride(-1) if feature_major else matrix.shape[-1], int(feature_major)


def _dense(matrix: Tensor) -> Tensor:
    return matrix.clone(memory_format=torch.contiguous_format)


def _aligned(values: Tensor) -> Tensor:
    return values.clone() if values.is_cuda and values.data_ptr() % _ALIGNMENT else values


def _overlap(operand: Tensor, out: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    first, second = _range(operand), _range(out)
    return first[0] < second[1] and second[0] < first[1]


def _range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _launch(
    pattern: BlockPattern,
    op: int,
    x: Operand,
    y: Operand,
    values: Tensor,
    bias: Tensor | None = None,
    activation: int = 0,
    accumulate: bool = False,
) -> None:
    dtype, device, stream, precision = DTYPES[values.dtype], values.get_device(), 0, 0
    if device >= 0:
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return _launch(pattern, op, x, y, values, bias, activation, accumulate)
        stream = torch._C._cuda_getCurrentRawStream(device)
        precision = int(dtype == DTYPES[torch.float32] and _tf32_allowed())
    x_memory, tokens, ldx, x_layout = x
    y_memory, _, ldy, y_layout = y
    descriptor, kernel, plan, plan_bytes, workspace_bytes = pattern.prepared.launch(
        (op, dtype, device, stream, tokens, x_layout, y_layout, activation, precision, _forced_kernel)
    )
    workspace = values.new_empty(workspace_bytes, dtype=torch.uint8) if workspace_bytes else None
    bias = bias.contiguous() if bias is not None else None
    _C.matmul(
        descriptor,
        op,
        dtype,
        int(device >= 0),
        activation,
        precision,
        int(accumulate),
        kernel,
        tokens,
        x_memory.data_ptr(),
        ldx,
        x_layout,
        y_memory.data_ptr(),
        ldy,
        y_layout,
        values.data_ptr(),
        bias.data_ptr() if bias is not None else 0,
        plan,
        plan_bytes,
        workspace.data_ptr() if workspace is not None else 0,
        workspace_bytes,
        stream,
    )


def _tf32_allowed() -> bool:
    """Whether PyTorch's settings let float32 products run in TF32."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # PyTorch 2.9 and later
        return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")
    return bool(torch._C._get_cublas_allow_tf32())


def _dds_nt_fake(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    handle: int,
    version: int,
    activation: int = 0,
    feature_major: bool = False,
) -> Tensor:
    pattern = _current(handle, version)
    _check_dds(pattern, "x", x, pattern.in_features, values, bias)
    return _empty(x, pattern.out_features, feature_major)


def _dds_nn_fake(y: Tensor, values: Tensor, handle: int, version: int, feature_major: bool = False) -> Tensor:
    pattern = _current(handle, version)
    _check_dds(pattern, "y", y, pattern.out_features, values)
    return _empty(y, pattern.in_features, feature_major)


def _sdd_tn_fake(y: Tensor, x: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    return x.new_empty(pattern.prepared.values_shape)


def _sdd_tn_into_fake(y: Tensor, x: Tensor, out: Tensor, handle: int, version: int, accumulate: bool) -> None:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    _check_values("out", out, pattern, "x", x)


for _name, _kernel, _fake in (
    ("dds_nt", _dds_nt, _dds_nt_fake),
    ("dds_nn", _dds_nn, _dds_nn_fake),
    ("sdd_tn", _sdd_tn, _sdd_tn_fake),
    ("sdd_tn_into", _sdd_tn_into, _sdd_tn_into_fake),
):
    torch.library.register_fake(f"tilesparse::{_name}", _fake, lib=LIB)
    LIB.impl(_name, _kernel, "CPU")
    LIB.impl(_name, _kernel, "CUDA")
for _name, _kernel in (("dds_nt", _dds_nt), ("dds_nn", _dds_nn), ("sdd_tn", _sdd_tn)):
    LIB.impl(_name, with_autograd(_name, _kernel), "Autograd", with_keyset=True)
