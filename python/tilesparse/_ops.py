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
from ._prepared import Call, LaunchKey, PreparedPattern, Run
from .errors import InvalidArgumentError, PatternChangedError
from .pattern import INT32_MAX, BlockPattern, blocks_of, lookup

DDS_NT, DDS_NN, SDD_TN = range(3)
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}

_ALIGNMENT = 16  # bytes, of every operand and leading dimension on CUDA devices

LIB: Any = torch.library.Library("tilesparse", "DEF")  # type: ignore[no-untyped-call]
LIB.define(
    "dds_nt(Tensor x, Tensor values, Tensor? bias, int handle, int version, "
    "int activation=0, bool feature_major=False, Tensor? residual=None) -> Tensor"
)
LIB.define("dds_nn(Tensor y, Tensor values, int handle, int version, bool feature_major=False) -> Tensor")
LIB.define("sdd_tn(Tensor y, Tensor x, int handle, int version) -> Tensor")
LIB.define("sdd_tn_into(Tensor y, Tensor x, Tensor(a!) out, int handle, int version, bool accumulate) -> ()")
LIB.define("expand(Tensor values, int handle, int version) -> Tensor")
LIB.define("gather(Tensor dense, int handle, int version) -> Tensor")

Context = tuple[int, int, int, int]  # kernel asked for, stream, current device, precision
Lines = tuple[int, int, int]  # of activations: tokens, elements from line to line, layout

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
    residual: Tensor | None = None,
) -> Tensor:
    pattern = _current(handle, version)
    return dds(DDS_NT, x, values, pattern, feature_major, bias, activation, residual)


def _dds_nn(y: Tensor, values: Tensor, handle: int, version: int, feature_major: bool = False) -> Tensor:
    return dds(DDS_NN, y, values, _current(handle, version), feature_major)


def _sdd_tn(y: Tensor, x: Tensor, handle: int, version: int) -> Tensor:
    return sdd(y, x, _current(handle, version))


def _sdd_tn_into(y: Tensor, x: Tensor, out: Tensor, handle: int, version: int, accumulate: bool) -> None:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    _check_values("out", out, pattern, "x", x)
    for name, operand in (("y", y), ("x", x)):
        if _overlap(operand, out):
            raise InvalidArgumentError(f"out: must not share memory with {name}")
    if _is_misaligned(out):
        raise InvalidArgumentError(f"out: must be aligned to {_ALIGNMENT} bytes")
    _sdd(y, x, out, pattern, accumulate)


def _expand(values: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_values("values", values, pattern, "values", values)
    dense = values.new_zeros(pattern.shape)
    # Written through a view: building the blocks and then transposing them takes twice as long.
    blocks_of(dense, pattern.block_shape)[pattern.prepared.block_indices_on(values.device)] = values
    return dense


def _gather(dense: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_dense(dense, pattern)
    blocks = blocks_of(dense, pattern.block_shape)
    return blocks[pattern.prepared.block_indices_on(dense.device)].contiguous()


# All that decides whether a product can run, and how, makes up a key, but for the alignment of its
# operands. What a key stands for is checked and resolved once, so that later calls cost one look-up.


def dds(
    op: int,
    source: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    feature_major: bool,
    bias: Tensor | None = None,
    activation: int = 0,
    residual: Tensor | None = None,
) -> Tensor:
    prepared, context = pattern.prepared, _context(source)
    bias_form = None if bias is None else _form(bias)
    residual_form = None if residual is None else _form(residual)
    key = (op, _form(source), _form(values), bias_form, residual_form, activation, feature_major, context)
    call = prepared.find(key)
    source_at, values_at = source.data_ptr(), values.data_ptr()
    residual_at = 0 if residual is None else residual.data_ptr()
    if call is None or ((source_at | values_at | residual_at) % _ALIGNMENT and source.is_cuda):
        name, features = ("x", pattern.in_features) if op == DDS_NT else ("y", pattern.out_features)
        check_dds(pattern, name, source, features, values, bias, residual)
        (usable, lines), aligned = _usable(name, source), _aligned(values)
        added, added_lines = (None, None) if residual is None else _like_result(residual, feature_major)
        if usable is not source or aligned is not values or added is not residual:
            return dds(op, usable, aligned, pattern, feature_major, bias, activation, added)
        call = _dds_call(op, source, lines, added_lines, pattern, activation, feature_major, context)
        prepared.remember(key, call)
    run, workspace_size, shape, strides = call
    result = _empty(source, shape, strides)
    bias = None if bias is None else bias.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    workspace = source.new_empty(workspace_size) if workspace_size else None
    workspace_at = 0 if workspace is None else workspace.data_ptr()
    if op == DDS_NT:
        run(source_at, result.data_ptr(), values_at, bias_at, residual_at, workspace_at)
    else:
        run(result.data_ptr(), source_at, values_at, 0, 0, workspace_at)
    return result


def sdd(y: Tensor, x: Tensor, pattern: BlockPattern) -> Tensor:
    out = x.new_empty(*pattern.prepared.values_shape)
    _sdd(y, x, out, pattern)
    return out


def _sdd(y: Tensor, x: Tensor, out: Tensor, pattern: BlockPattern, accumulate: bool = False) -> None:
    prepared, context = pattern.prepared, _context(x)
    key = (SDD_TN, _form(y), _form(x), accumulate, context)
    call = prepared.find(key)
    y_at, x_at = y.data_ptr(), x.data_ptr()
    if call is None or ((y_at | x_at) % _ALIGNMENT and x.is_cuda):
        _check_sdd(pattern, y, x)
        (usable_y, y_lines), (usable_x, x_lines) = _usable("y", y), _usable("x", x)
        if usable_y is not y or usable_x is not x:
            return _sdd(usable_y, usable_x, out, pattern, accumulate)
        bound = _bind(SDD_TN, x, x_lines, y_lines, prepared, context, accumulate=accumulate)
        call = Call(*bound, prepared.values_shape)
        prepared.remember(key, call)
    workspace = x.new_empty(call.workspace) if call.workspace else None
    call.run(x_at, y_at, out.data_ptr(), 0, 0, 0 if workspace is None else workspace.data_ptr())


def _context(operand: Tensor) -> Context:
    """What decides on a call besides its arguments."""
    device = operand.get_device()
    if device < 0:
        return _forced_kernel, 0, device, 0
    tf32 = operand.dtype == torch.float32 and _tf32_allowed()
    stream = torch._C._cuda_getCurrentRawStream(device)
    return _forced_kernel, stream, torch._C._cuda_getDevice(), int(tf32)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its memory. Only tensors of the CPU (-1) and of CUDA devices come here."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _dds_call(
    op: int,
    source: Tensor,
    lines: Lines,
    residual: Lines | None,
    pattern: BlockPattern,
    activation: int,
    feature_major: bool,
    context: Context,
) -> Call:
    features = pattern.out_features if op == DDS_NT else pattern.in_features
    shape, strides = _result(source, features, feature_major)
    result_lines = (lines[0], features, 0) if strides is None else (lines[0], strides[-1], 1)
    x, y = (lines, result_lines) if op == DDS_NT else (result_lines, lines)
    ldr = 0 if residual is None else residual[1]
    return Call(*_bind(op, source, x, y, pattern.prepared, context, activation, ldr), shape, strides)


def _current(handle: int, version: int) -> BlockPattern:
    pattern = lookup(handle)
    if pattern.version != version:
        raise PatternChangedError(
            f"version: the pattern was updated since this product was recorded "
            f"(version {version} expected, it now has {pattern.version})"
        )
    return pattern


def check_dds(
    pattern: BlockPattern,
    name: str,
    matrix: Tensor,
    features: int,
    values: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    _check_activations(name, matrix, features)
    _check_values("values", values, pattern, name, matrix)
    if bias is not None:
        _check_added("bias", bias, (pattern.out_features,), name, matrix)
    if residual is not None:
        _check_added("residual", residual, (*matrix.shape[:-1], pattern.out_features), name, matrix)


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


def _check_dense(dense: Tensor, pattern: BlockPattern) -> None:
    if dense.shape != pattern.shape:
        raise InvalidArgumentError(f"dense: shape {pattern.shape} expected, got {tuple(dense.shape)}")


def checked_residual(residual: Tensor, y: Tensor) -> Tensor:
    """The residual, if it can be added to a product."""
    _check_added("residual", residual, y.shape, "the product", y)
    return residual


def _check_added(name: str, tensor: Tensor, shape: tuple[int, ...], like_name: str, like: Tensor) -> None:
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{name}: shape {tuple(shape)} expected, got {tuple(tensor.shape)}")
    _check_alike(name, tensor, like_name, like)


def _check_alike(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise InvalidArgumentError(f"{name}: dtype {like.dtype} of {like_name} expected, got {tensor.dtype}")
    if tensor.device != like.device:
        raise InvalidArgumentError(
            f"{name}: device {like.device} of {like_name} expected, got {tensor.device}"
        )


def _names(dtypes: dict[torch.dtype, int]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _result(
    like: Tensor, features: int, feature_major: bool
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides, None if contiguous, of [..., features] beside ``like`` [..., other features]."""
    shape = (*like.shape[:-1], features)
    if not feature_major:
        return shape, None
    strides: list[int] = []
    tokens = 1
    for size in reversed(shape[:-1]):
        strides.insert(0, tokens)
        tokens *= size
    step = _ALIGNMENT // like.itemsize if like.is_cuda else 1
    return shape, (*strides, (tokens + step - 1) // step * step)


def _empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Tensor:
    if strides is None:
        return like.new_empty(*shape)  # a sequence takes longer to parse
    return like.new_empty_strided(shape, strides)


def _lines(matrix: Tensor, tokens: int, layouts: tuple[int, ...]) -> Lines | None:
    """How activations lie in memory; None: in none of these layouts, or not as the library reads it."""
    features = matrix.shape[-1]
    if tokens == 0:
        return 0, features, layouts[0]
    try:
        token_stride, feature_stride = matrix.view(-1, features).stride()
    except RuntimeError:  # tokens at varying distances
        return None
    # The stride of a single token may be anything.
    if 0 in layouts and feature_stride == 1 and (tokens == 1 or token_stride >= features):
        ld, layout = (token_stride if tokens > 1 else features), 0
    elif 1 in layouts and (token_stride == 1 or tokens == 1) and feature_stride >= tokens:
        ld, layout = feature_stride, 1
    else:
        return None
    return None if matrix.is_cuda and ld * matrix.itemsize % _ALIGNMENT else (tokens, ld, layout)


def _usable(name: str, matrix: Tensor) -> tuple[Tensor, Lines]:
    """Activations as the library takes them; a copy where their strides or alignment do not fit."""
    features = matrix.shape[-1]
    tokens = matrix.numel() // features
    if tokens > INT32_MAX:
        raise InvalidArgumentError(f"{name}: fewer than 2^31 tokens expected, got {tokens}")
    lines = _lines(matrix, tokens, (0, 1))
    if lines is None or _is_misaligned(matrix):
        return _dense(matrix), (tokens, features, 0)
    return matrix, lines


def _like_result(residual: Tensor, feature_major: bool) -> tuple[Tensor, Lines | None]:
    """A residual in the layout of the result, and None for its lines if it had to be copied."""
    features = residual.shape[-1]
    lines = _lines(residual, residual.numel() // features, (int(feature_major),))
    if lines is None or _is_misaligned(residual):
        return _empty(residual, *_result(residual, features, feature_major)).copy_(residual), None
    return residual, lines


def _aligned(tensor: Tensor) -> Tensor:
    return _dense(tensor) if _is_misaligned(tensor) else tensor


def _is_misaligned(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.data_ptr() % _ALIGNMENT != 0


def _dense(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _overlap(operand: Tensor, out: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    first, second = _range(operand), _range(out)
    return first[0] < second[1] and second[0] < first[1]


def _range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _bind(
    op: int,
    like: Tensor,
    x: Lines,
    y: Lines,
    prepared: PreparedPattern,
    context: Context,
    activation: int = 0,
    ldr: int = 0,
    accumulate: bool = False,
) -> tuple[Run, int]:
    """How to run a product, and the elements of its workspace."""
    (tokens, ldx, x_layout), (_, ldy, y_layout) = x, y
    kernel, stream, current_device, precision = context
    dtype, device = DTYPES[like.dtype], like.get_device()
    residual = ldr > 0
    key = LaunchKey(
        op, dtype, device, stream, tokens, x_layout, y_layout, activation, precision, kernel, residual
    )
    with torch.cuda.device(device):  # -1 changes nothing
        launch = prepared.launch(key)
    run = _C.Launch(
        launch.pattern,
        op,
        dtype,
        int(device >= 0),
        activation,
        precision,
        int(accumulate),
        launch.kernel,
        tokens,
        ldx,
        x_layout,
        ldy,
        y_layout,
        ldr,
        launch.plan,
        launch.plan_bytes,
        launch.workspace_bytes,
        stream,
    ).run
    workspace_size = -(-launch.workspace_bytes // like.itemsize)
    return run if device == current_device else _on_device(device, run), workspace_size


def _on_device(device: int, run: Run) -> Run:
    def guarded(*addresses: int) -> None:
        with torch.cuda.device(device):
            run(*addresses)

    return guarded


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
    residual: Tensor | None = None,
) -> Tensor:
    pattern = _current(handle, version)
    check_dds(pattern, "x", x, pattern.in_features, values, bias, residual)
    return _empty(x, *_result(x, pattern.out_features, feature_major))


def _dds_nn_fake(y: Tensor, values: Tensor, handle: int, version: int, feature_major: bool = False) -> Tensor:
    pattern = _current(handle, version)
    check_dds(pattern, "y", y, pattern.out_features, values)
    return _empty(y, *_result(y, pattern.in_features, feature_major))


def _sdd_tn_fake(y: Tensor, x: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    return x.new_empty(pattern.prepared.values_shape)


def _sdd_tn_into_fake(y: Tensor, x: Tensor, out: Tensor, handle: int, version: int, accumulate: bool) -> None:
    pattern = _current(handle, version)
    _check_sdd(pattern, y, x)
    _check_values("out", out, pattern, "x", x)


def _expand_fake(values: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_values("values", values, pattern, "values", values)
    return values.new_empty(pattern.shape)


def _gather_fake(dense: Tensor, handle: int, version: int) -> Tensor:
    pattern = _current(handle, version)
    _check_dense(dense, pattern)
    return dense.new_empty(pattern.prepared.values_shape)


for _name, _kernel, _fake in (
    ("dds_nt", _dds_nt, _dds_nt_fake),
    ("dds_nn", _dds_nn, _dds_nn_fake),
    ("sdd_tn", _sdd_tn, _sdd_tn_fake),
    ("sdd_tn_into", _sdd_tn_into, _sdd_tn_into_fake),
    ("expand", _expand, _expand_fake),
    ("gather", _gather, _gather_fake),
):
    torch.library.register_fake(f"tilesparse::{_name}", _fake, lib=LIB)
    LIB.impl(_name, _kernel, "CPU")
    LIB.impl(_name, _kernel, "CUDA")
for _name, _kernel in (
    ("dds_nt", _dds_nt),
    ("dds_nn", _dds_nn),
    ("sdd_tn", _sdd_tn),
    ("expand", _expand),
    ("gather", _gather),
):
    LIB.impl(_name, with_autograd(_name, _kernel), "Autograd", with_keyset=True)
