"""The ways to compute a linear layer that are measured against each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._runtime.choice import DECODE_TOKENS
from ..._runtime.timing import Call
from ...config import BlockSparseConfig
from ...errors import UnsupportedError
from ...functional import quantize
from ...prune.measured import random_layer
from ...prune.targets import block_shape_of, kept_blocks
from ...storage.registry import storage_of
from ..products import dtype_name
from ..storing import is_converted_in_calls

_FLOAT8 = torch.float8_e4m3fn
_CPU_DECODE_TOKENS = 8  # that kernels for int4 take there
_DENSE_8_BITS = {"cpu": "int8", "cuda": dtype_name(_FLOAT8)}  # what PyTorch multiplies fastest
_SPARSE_8_BITS = {"cpu": ("int8",), "cuda": ("int8", dtype_name(_FLOAT8))}


@dataclass(frozen=True)
class Contender:
    """One way to compute the linear layers of a model.

    Attributes:
        config: how block-sparse layers are stored; None for dense layers.
        eight_bits: dtype of both factors of dense layers in 8 bits, "int8" or "float8_e4m3fn"; None for
            dense layers in their own dtype, and for block-sparse ones.
    """

    config: BlockSparseConfig | None = None
    eight_bits: str | None = None

    @property
    def is_dense(self) -> bool:
        """True for dense layers, in 8 bits or not."""
        return self.config is None

    def __str__(self) -> str:
        if self.config is None:
            return f"dense {self.eight_bits.removesuffix('_e4m3fn')}" if self.eight_bits else "dense"
        bn, bk = block_shape_of(self.config)
        stored = storage_of(self.config.storage)
        extra = "" if stored.trainable else f", {stored.describe(None, self.config.activations)}"
        return f"density {self.config.density:g}, {bn}x{bk}{extra}"


DENSE = Contender()


def contenders_for(
    device: torch.device,
    dtype: torch.dtype,
    densities: Sequence[float],
    block_shapes: Sequence[tuple[int, int]],
    tokens: int,
) -> list[Contender]:
    """Return the contenders for layers of a dtype: dense ones first, then those of the highest density.

    Args:
        device: where they compute.
        dtype: of the layers.
        densities: of the sparse ones.
        block_shapes: of the sparse ones.
        tokens: the most that a layer is called with; weights in 4 bits are for few.
    """
    eight = () if dtype == torch.float64 else _SPARSE_8_BITS[device.type]
    stored: list[dict[str, Any]] = [{}, *({"storage": name, "activations": name} for name in eight)]
    if tokens <= (DECODE_TOKENS if device.type == "cuda" else _CPU_DECODE_TOKENS):
        stored.append({"storage": "int4"})
    dense = [DENSE, *([Contender(eight_bits=_DENSE_8_BITS[device.type])] if eight else [])]
    return dense + [
        Contender(BlockSparseConfig(density, shape, None, **options))
        for density in sorted(densities, reverse=True)
        for shape in block_shapes
        for options in stored
    ]


def in_own_dtype(contender: Contender) -> Contender:
    """Return the contender of the same blocks whose weights and activations have the dtype of the model."""
    config = contender.config
    return DENSE if config is None else Contender(BlockSparseConfig(config.density, block_shape_of(config)))


def call_of(contender: Contender, shape: tuple[int, int], x: Tensor) -> Call:
    """Return a call of a layer with random weights and blocks, prepared for inference.

    Args:
        contender: how the layer computes.
        shape: (out_features, in_features).
        x: [tokens, in_features].

    Raises:
        UnsupportedError: nothing here computes it, or only by converting the weight in every call.
        InvalidArgumentError: the layer cannot be cut into such blocks, or none of them would be left.
    """
    if contender.config is not None:
        return _sparse(contender.config, shape, x)
    weight = torch.randn(shape, device=x.device, dtype=x.dtype)
    if contender.eight_bits is None:
        return partial(F.linear, x, weight)
    try:
        call = (_dense_float8 if x.is_cuda else _dense_int8)(weight, x)
        call()
    except (RuntimeError, NotImplementedError) as error:  # PyTorch's own, by device and version
        raise UnsupportedError(f"PyTorch does not compute it here: {str(error).splitlines()[0]}") from error
    return call


def _sparse(config: BlockSparseConfig, shape: tuple[int, int], x: Tensor) -> Call:
    kept_blocks(config, shape)
    layer = random_layer(shape, config, x.device, x.dtype)
    stored = not storage_of(config.storage).trainable
    if stored and config.activations is None and is_converted_in_calls(layer, [len(x)]):
        raise UnsupportedError("no kernel reads weights that are stored so with as many tokens")
    if x.is_cuda:  # on the CPU kernels read the weight as it is
        layer.pack()
    layer(x)  # raises where no kernel computes it
    return partial(layer, x)


def _dense_float8(weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """Multiply with a scale for each row of both factors, and quantize x in every call."""
    w, of_w = quantize(weight, _FLOAT8)

    def call() -> Tensor:
        q, of_x = quantize(x, _FLOAT8)
        # With scales of rows PyTorch gives bfloat16 alone.
        y: Any = torch._scaled_mm(
            q, w.t(), of_x[:, None], of_w[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y.to(x.dtype)  # type: ignore[no-any-return]

    return call


def _dense_int8(weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """Multiply by PyTorch's dynamically quantized layer, whose x is float32."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it will move to torchao
        from torch.ao.quantization import quantize_dynamic

        layer = quantize_dynamic(nn.Sequential(linear), {nn.Linear})  # type: ignore[no-untyped-call]
    return lambda: layer(x.float()).to(x.dtype)
