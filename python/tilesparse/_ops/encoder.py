"""Layers of encoders of texts and images on a CPU, in one native call: `Encoder`."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._checks import DTYPES
from .._runtime import launch
from .._runtime.device import ACTIVATIONS
from ..errors import InvalidArgumentError, UnsupportedError
from ..pattern import BlockPattern

if TYPE_CHECKING:
    from ..nn.linear import BlockSparseLinear


class EncoderWeight(NamedTuple):
    """A linear layer as `BlockSparseLinear` holds it with int8 storage and int8 activations."""

    pattern: BlockPattern  # on the CPU
    values: Tensor  # int8 [nnz, bn, bk]
    scales: Tensor  # float32 [out_features], one of each output feature
    bias: Tensor | None = None  # [out_features]

    @classmethod
    def of(cls, layer: BlockSparseLinear) -> EncoderWeight:
        """Return the weight of a layer on the CPU in that storage."""
        assert layer.scales is not None
        return cls(layer.pattern, layer.weight.detach(), layer.scales, layer.bias)


class EncoderNorm(NamedTuple):
    """A LayerNorm over the hidden features; without a weight it changes nothing."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


class EncoderLayer(NamedTuple):
    """One layer.

    Computes ``h = attention_norm(x + output(attention(qkv(x))))`` and
    ``mlp_norm(h + down(activation(up(h))))``. With ``norm_first`` these are
    ``h = x + output(attention(qkv(attention_norm(x))))`` and ``h + down(activation(up(mlp_norm(h))))``. With
    ``gated`` the result of ``up`` has two halves, and ``down`` gets ``activation(first) * second``.
    """

    heads: int  # those of q come first in qkv, then those of k and of v
    qkv: EncoderWeight  # [3 * heads * head_features, hidden]; features a multiple of 16, with rotary of 32
    output: EncoderWeight  # [hidden, heads * head_features]
    up: EncoderWeight  # [inner, hidden], or with `gated` [2 * inner, hidden]
    down: EncoderWeight  # [hidden, inner]
    attention_norm: EncoderNorm  # its weight may be None with `norm_first` alone
    mlp_norm: EncoderNorm
    norm_first: bool = False  # norms come before products (ModernBERT, ViT), not after them (BERT)
    activation: str = "gelu"  # the one with erf, or "relu", "silu" or "none"
    gated: bool = False
    scale: float | None = None  # of the products of q and k; None is ``head_features ** -0.5``
    window: int = 0  # how many places away the tokens are that a token attends to; 0: all
    # Float32 [positions, head_features]: of each place in a sentence the cosines of half as many angles, then
    # their sines; feature f is turned with feature f + head_features / 2.
    rotary: Tensor | None = None
    # Float32 [heads, 2 * positions - 1], added to scores of query i and key j: column j - i + positions - 1.
    position_bias: Tensor | None = None


_WORKSPACES: list[Tensor] = []  # that no call uses


class Encoder:
    """Layers that run one after another in one native call, for inference on a CPU.

    Tensors are kept, not copied, if they are contiguous and of the right dtype; writes to them count. With
    AMX a packed copy of the values is kept, too, and made again once PyTorch has counted a write. Kernels are
    those of products in int8, with exact sums; all else is computed in float32. No gradient is recorded.
    """

    def __init__(self, layers: Sequence[EncoderLayer]) -> None:
        self._native = _C.Encoder()
        self._kept: list[Tensor] = []
        self._values: list[Tensor] = []
        if not layers:
            raise InvalidArgumentError("layers must have at least one layer, got none")
        self.hidden = layers[0].qkv.pattern.in_features
        for number, layer in enumerate(layers):
            self._add(layer, f"layers[{number}]")
        # Sizes are checked with a workspace, before anything runs.
        offsets = torch.zeros(1, dtype=torch.int32)
        self._native.workspace_size(DTYPES[torch.float32], 0, 0, offsets.data_ptr(), 0, "")
        # Writes to tensors of inference mode are not counted, so that their values are read where they lie.
        self._prepacks = not any(values.is_inference() for values in self._values)
        self._versions: list[int] = []
        self._lock = threading.Lock()
        self._prepack()

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return the hidden states after all layers.

        Args:
            x: float32 or bfloat16 [tokens, hidden] on the CPU, the tokens of all sentences one after another.
            offsets: int32 [sentences + 1] on the CPU: where sentences begin, from 0 to tokens.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise InvalidArgumentError(f"x must be [tokens, {self.hidden}], got {list(x.shape)}")
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise InvalidArgumentError(f"x must have dtype float32 or bfloat16, got {x.dtype}")
        if x.stride(1) != 1 or x.stride(0) < self.hidden:
            x = x.contiguous()
        offsets = offsets.contiguous()
        self._prepack()
        tokens, sentences = x.shape[0], len(offsets) - 1
        y = torch.empty(tokens, self.hidden, dtype=x.dtype)
        asked = launch.asked_kernel
        call = DTYPES[x.dtype], tokens, sentences, offsets.data_ptr(), max(asked, 0), launch.preferred(asked)
        try:
            workspace = _WORKSPACES.pop()
        except IndexError:
            workspace = torch.empty(64, dtype=torch.uint8)
        try:
            matrices = (x.data_ptr(), x.stride(0)), (y.data_ptr(), self.hidden)
            while needed := self._native.run(*call, *matrices, workspace.data_ptr(), workspace.numel()):
                workspace = torch.empty(needed, dtype=torch.uint8)
        finally:
            _WORKSPACES.append(workspace)
        return y

    def _prepack(self) -> None:
        """Pack values that were written to since they were packed."""
        if not self._prepacks or self._versions == (versions := [values._version for values in self._values]):
            return
        with self._lock:
            if self._versions != versions:
                self._native.prepack()
                self._versions = versions

    def _add(self, layer: EncoderLayer, name: str) -> None:
        head_features = layer.output.pattern.in_features // layer.heads
        turns, bias = layer.rotary, layer.position_bias
        positions = 0 if turns is None else turns.shape[0]
        positions = positions if bias is None else positions or (bias.shape[1] + 1) // 2
        self._native.add_layer(
            layer.heads,
            head_features,
            1 / math.sqrt(head_features) if layer.scale is None else layer.scale,
            ACTIVATIONS[layer.activation],
            layer.norm_first,
            layer.gated,
            layer.window,
            positions,
            self._keep(turns, f"{name}.rotary", (positions, head_features)),
            self._keep(bias, f"{name}.position_bias", (layer.heads, 2 * positions - 1)),
        )
        for place, field in enumerate(("qkv", "output", "up", "down")):
            self._set_weight(place, getattr(layer, field), f"{name}.{field}")
        for place, field in enumerate(("attention_norm", "mlp_norm")):
            norm: EncoderNorm = getattr(layer, field)
            size = (self.hidden,)
            weight = self._keep(norm.weight, f"{name}.{field}.weight", size)
            self._native.set_norm(
                place, weight, self._keep(norm.bias, f"{name}.{field}.bias", size), norm.epsilon
            )

    def _set_weight(self, place: int, weight: EncoderWeight, name: str) -> None:
        pattern, values = weight.pattern, weight.values
        self._values.append(values)
        arrays: Any = pattern.crow_indices, pattern.col_indices, pattern.slot
        addresses = [self._keep(array, f"{name}.pattern", None, torch.int32) for array in arrays]
        self._native.set_weight(
            place,
            _C.Pattern(*pattern.block_shape, *pattern.shape, pattern.nnz, *addresses),
            self._keep(values, f"{name}.values", (pattern.nnz, *pattern.block_shape), torch.int8),
            self._keep(weight.scales, f"{name}.scales", (pattern.out_features,)),
            self._keep(weight.bias, f"{name}.bias", (pattern.out_features,)),
        )

    def _keep(
        self,
        tensor: Tensor | None,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Return the address of a tensor, or 0."""
        if tensor is None:
            return 0
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{name} must be on the CPU, got {tensor.device}")
        if shape is not None and tuple(tensor.shape) != shape:
            raise InvalidArgumentError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        kept: Any = tensor.detach().to(dtype).contiguous()
        self._kept.append(kept)
        address: int = kept.data_ptr()
        return address
