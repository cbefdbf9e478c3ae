"""One product for several layers that a module calls with one x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._ops.autograd import records_gradient
from .._runtime.pattern_cache import content_of
from .._runtime.torch_private import current_stream, is_exporting, transforms_active, with_own_number
from ..errors import InvalidArgumentError
from ..pattern import BlockPattern
from ..storage.formats import STORED_NAMES
from .linear import BlockSparseLinear, layer_like
from .weight import Stored, layer_index, stored_of

_ROWS = ("weight", *STORED_NAMES, "bias")  # tensors of which a layer has a slice


class _Left(NamedTuple):
    """Results that are not taken yet, by the layer's number, and the x that they are of."""

    x: Tensor
    state: tuple[object, ...]
    results: dict[int, Tensor]


class MergedProduct:
    """One product for layers that their parent calls with one x, such as q, k and v.

    The first layer's call computes the results of all, and the others take theirs: in the same call of the
    parent, with the same x, if nothing has written to x in between. Any other call computes its own product,
    and so does a layer that was changed, or that has to record a gradient of its parameters.

    The layers keep their names, hooks and contents. Their tensors become slices of those of the product, so
    what is written to weight or bias in place counts. Hooks of the parent begin and end its calls. A copied
    or unpickled model merges nothing, and neither do exported programs.

    PyTorch counts no writes to tensors of inference mode, or while code is compiled. There, what was seen of
    the parent's calls has to do, and only layers without hooks and in evaluation mode share.

    Attributes:
        layers: the layers, in the order in which they are called.
        whole: has the rows of all layers, see `concatenate`.
    """

    whole: BlockSparseLinear

    def __init__(self, parent: nn.Module | None = None, layers: Sequence[BlockSparseLinear] = ()) -> None:
        self.layers = tuple(layers)
        self._is_open = False  # during a call of the parent
        self._left: _Left | None = None
        self._own: list[dict[str, Tensor]] = []  # the tensors of each layer from before
        if parent is None:  # in a copy
            return
        with torch.inference_mode(False), torch.no_grad():
            self.whole = concatenate(layers).eval().requires_grad_(False)
            self._take_slices()
        self._sizes = [layer.out_features for layer in layers]
        self._made_of = [self._state_of_layer(layer) for layer in layers]
        self._hooks = [
            parent.register_forward_pre_hook(self.begin),
            with_own_number(parent, parent.register_forward_hook(self.finish, always_call=True)),
        ]
        for number, layer in enumerate(layers):
            layer._merged = self, number

    def begin(self, *_: object) -> None:
        """Begin a call of the parent."""
        self._is_open, self._left = True, None

    def finish(self, *_: object) -> None:
        """Drop what is left at the end of a call of the parent."""
        self._is_open, self._left = False, None

    def result(self, number: int, x: Tensor) -> Tensor | None:
        """Return the result of one layer, or None if it has to compute that by itself."""
        if not self._is_open or not self._can_share(number, x):
            return None
        state = _state_of_call(x)
        if number == 0:
            first, *others = self.whole(x).split(self._sizes, -1)
            self._left = _Left(x, state, dict(enumerate(others, 1)))
            return first  # type: ignore[no-any-return]
        left = self._left  # read once: another thread may put its own there
        if left is None or left.x is not x or left.state != state:
            self._left = None  # memory that x had may be given to it again
            return None
        return left.results.pop(number, None)

    def own_result(self, layer: BlockSparseLinear, *args: Any) -> Tensor:
        """Return what a layer of these computes by itself."""
        number, layer._merged = self.layers.index(layer), None
        try:
            return layer.forward(*args)
        finally:
            layer._merged = self, number

    def end(self) -> None:
        """Have every layer compute its own product from now on."""
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer._merged = None
        self.finish()

    @torch.no_grad()
    def undo(self) -> None:
        """End, and give the layers back the very tensors that they had before."""
        self.end()
        for layer, own in zip(self.layers, self._own, strict=True):
            for name, tensor in own.items():
                tensor.data = tensor.data.clone()
                held: dict[str, Any] = layer._parameters if name in layer._parameters else layer._buffers
                held[name] = tensor

    def _take_slices(self) -> None:
        begin = dict.fromkeys(_ROWS, 0)
        for layer in self.layers:
            own: dict[str, Tensor] = {}
            for name in _ROWS:
                tensor = getattr(layer, name)
                if tensor is not None:
                    part = getattr(self.whole, name)[begin[name] :][: len(tensor)]
                    own[name] = tensor
                    tensor.data = part  # others may have it, and its memory is free
                    if name in layer._parameters:
                        layer._parameters[name] = nn.Parameter(part, requires_grad=tensor.requires_grad)
                    else:
                        layer._buffers[name] = part
                rows = layer.out_features if name == "bias" else 0 if tensor is None else len(tensor)
                begin[name] += rows  # a layer without a bias has zeros there
            self._own.append(own)

    def _can_share(self, number: int, x: Tensor) -> bool:
        """Return True if a layer is as it was merged, and nobody looks at its own product."""
        layer = self.layers[number]
        if is_exporting() or records_gradient((layer.weight, layer.bias)) or layer._observe is not None:
            return False
        if is_compiling() or x.is_inference():
            if any(each.training or each._forward_pre_hooks or each._forward_hooks for each in self.layers):
                return False
            if is_compiling():  # what PyTorch can see of changes compiles it anew
                return True
        if type(x) not in (Tensor, nn.Parameter) or transforms_active():
            return False
        return self._made_of[number] == self._state_of_layer(layer)

    def _state_of_layer(self, layer: BlockSparseLinear) -> tuple[object, ...]:
        """Return what differs once a tensor or setting of a layer is another, or its pattern is."""
        tensors = (layer._parameters.get(name, layer._buffers.get(name)) for name in _ROWS)
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        alike = layer.policy == self.whole.policy and layer.use_fast_accum == self.whole.use_fast_accum
        return *addresses, alike, *content_of(layer_index(layer))

    def __reduce__(self) -> Any:
        return MergedProduct, ()


def product_of(layer: BlockSparseLinear) -> MergedProduct | None:
    """Return the product that a layer shares with others, None for one of its own."""
    return None if layer._merged is None else layer._merged[0]


def _state_of_call(x: Tensor) -> tuple[object, ...]:
    """Return what differs once x was written to or moved, or results would be of another kind."""
    mode = torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
    if is_compiling():
        return mode
    written = -1 if x.is_inference() else x._version
    stream = current_stream(x.device.index) if x.is_cuda else 0
    return *mode, x.data_ptr(), written, stream


@torch.no_grad()
def concatenate(layers: Sequence[BlockSparseLinear]) -> BlockSparseLinear:
    """Return one layer whose result is the results of several layers of one x, one after the other.

    One product of more rows takes less time than several, as with q, k and v. Where block shapes differ all
    blocks are divided into the smallest, see `BlockPattern.refined`; nothing is rounded.

    Args:
        layers: which agree in in_features, dtype, device, storage, 2:4, scales, activations and policy. If
            one of them has a bias the result has one, of zeros for those without.

    Examples:
        >>> y = concatenate([q, k, v])(x)  # torch.cat([q(x), k(x), v(x)], -1)
    """
    if not layers:
        raise InvalidArgumentError("layers must have at least one layer, got none")
    stored = [stored_of(layer, "concatenate") for layer in layers]
    difference = _difference([_kind(layer) for layer in layers])
    if difference is not None:
        name, values = difference
        raise InvalidArgumentError(f"layers must agree in {name}, got {values}")
    bn, bk = (min(sizes) for sizes in zip(*(each.spec.block_shape for each in stored), strict=True))
    stored = [each.refined((bn, bk)) for each in stored]
    blocks, above = [], 0
    for each in stored:
        rows, columns = each.pattern.block_indices()
        blocks.append(torch.stack((rows + above // bn, columns), 1))
        above += each.spec.shape[0]
    shape = above, stored[0].spec.shape[1]
    pattern = BlockPattern.from_blocks(torch.cat(blocks), shape=shape, block_shape=(bn, bk))
    spec = replace(stored[0].spec, shape=shape, nnz=pattern.nnz)
    parts = [each.tensors for each in stored]
    if any("bias" in part for part in parts):
        zeros = [
            torch.zeros(each.spec.shape[0], dtype=spec.dtype, device=layers[0].weight.device)
            for each in stored
        ]
        parts = [{"bias": zero, **part} for zero, part in zip(zeros, parts, strict=True)]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    whole = layer_like(layers[0], Stored(spec, pattern, tensors))
    whole.use_fast_accum = layers[0].use_fast_accum
    return whole


def reason_not_one(layers: Sequence[nn.Module]) -> str | None:
    """Say why layers of one x cannot be one product, or return None."""
    sparse = [layer for layer in layers if isinstance(layer, BlockSparseLinear)]
    if len(sparse) < len(layers):
        dense = next(type(layer).__name__ for layer in layers if not isinstance(layer, BlockSparseLinear))
        return f"a {dense} is among them"
    difference = _difference([{"block_shape": layer.block_shape, **_kind(layer)} for layer in sparse])
    return None if difference is None else "they differ in {}: {}".format(*difference)


def _difference(kinds: list[dict[str, object]]) -> tuple[str, str] | None:
    """Return the first name with several values, and these."""
    for name in kinds[0]:
        values = dict.fromkeys(kind[name] for kind in kinds)
        if len(values) > 1:
            return name, ", ".join(map(str, values))
    return None


def _kind(layer: BlockSparseLinear) -> dict[str, object]:
    """Return what layers have to agree in."""
    names = "dtype", "storage", "nm", "transposable", "granularity", "activations", "policy", "threshold"
    own = {name: getattr(layer.spec, name) for name in names}
    own["use_fast_accum"] = layer.use_fast_accum
    return {**own, "in_features": layer.in_features, "device": layer.weight.device}
