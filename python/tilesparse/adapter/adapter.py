"""Adapters that are block-sparse themselves: a few blocks of each layer are trained, beside a frozen model.

What such an adapter learns lies where its layer keeps weights: merging fills no zeros and yet loses nothing,
where LoRA loses much (see `tilesparse.peft`). To train some weights and freeze the others is known as sparse
fine-tuning (Ansell et al., "Composable Sparse Fine-Tuning for Cross-Lingual Transfer", ACL 2022); here whole
blocks are chosen. PEFT is not needed; files are written and read by safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._runtime.tensor_files import write_tensors
from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    TileSparseError,
    UnsupportedError,
)
from ..functional import linear_on
from ..nn.linear import BlockSparseLinear
from ..patch.modules import names_of_modules, owners_of_parameters, set_submodule
from ..patch.rules import compiled_pattern
from ..pattern.block_pattern import BlockPattern

_VERSION = 1  # of the file
INDEX_NAMES = ("weight", "crow_indices", "col_indices", "slot")


class AdaptedLinear(nn.Module):
    """y = base_layer(x) + x Δᵀ, where Δ has some of the blocks that the layer keeps.

    Attributes:
        base_layer: the frozen `BlockSparseLinear`, in any storage.
        delta: a `BlockSparseLinear` without bias whose weight [n, bn, bk] is Δ, in float32 for layers of 16
            bits: it is multiplied in the dtype of x, and its gradient is summed up in its own. In other
            storages than "plain" it can be multiplied and merged, but neither trained nor saved.
    """

    @checked
    def __init__(self, base_layer: BlockSparseLinear, delta: BlockSparseLinear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.delta = delta

    # As of the layer, which models read: T5 asks for the dtype of the weight.

    @property
    def weight(self) -> nn.Parameter:
        """Of base_layer, without Δ."""
        return self.base_layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """Of base_layer."""
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        """Size of the last dimension of x."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Size of the last dimension of y."""
        return self.base_layer.out_features

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Computes y = x (W + Δ)ᵀ + bias, Δ in its own blocks alone.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added to the result, or None.

        Returns:
            y [..., out_features].
        """
        y = self.base_layer(x, residual=residual)
        delta = self.delta
        if delta._origin:
            delta._settle()
        if delta.storage != "plain":  # by a loop over all layers of the model
            values = delta.plain_values()
        else:
            values = delta.weight if delta.mask is None else torch.where(delta.mask, delta.weight, 0)
        return linear_on(x, values.to(x.dtype), delta._index(), residual=y)


class BlockSparseAdapter:
    """Trains a fraction of the blocks of a model's block-sparse layers, in place.

    All parameters of the model are frozen, and each layer becomes an `AdaptedLinear` whose Δ begins with
    zeros. A step computes the gradients of the chosen blocks alone.

    Args:
        model: with `BlockSparseLinear` layers, in any storage.
        regex: which of them, by their qualified names, as in `BlockSparseModelPatcher.add_pattern`
            (`re.match`).
        density: fraction of a layer's kept blocks that is trained, at least one of each layer.
        scores: which blocks: by name of the layer, one number for each kept block [nnz] in the order of its
            weight, higher is better, such as ``layer.weight.grad.norm(dim=(1, 2))``. None draws them.
        generator: a CPU generator for blocks that are drawn.

    Attributes:
        model: as given.
        layers: by name, the `AdaptedLinear` layers.

    Raises:
        InvalidArgumentError: no layer matches, one that matches has an adapter or no blocks or shares its
            weight with another one, or `density` or `scores` do not fit. The model is as it was.

    Examples:
        >>> adapter = BlockSparseAdapter(model, r".*mlp", density=0.1)
        >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
        >>> ...
        >>> adapter.save("adapter.safetensors")  # elsewhere BlockSparseAdapter.load(model, …)
        >>> adapter.merge()
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        regex: str,
        density: float = 0.1,
        *,
        scores: Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(density, bool) or not isinstance(density, Real) or not 0 < float(density) <= 1:
            raise InvalidArgumentError(f"density: a number above 0 and at most 1 expected, got {density!r}")
        layers = _matching(model, regex)
        if scores is not None and scores.keys() != layers.keys():
            odd = sorted(scores.keys() ^ layers.keys())
            raise InvalidArgumentError(f"scores: one tensor for each layer that matches expected, see {odd}")
        chosen = {
            name: _chosen(name, layer, density, None if scores is None else scores[name], generator)
            for name, layer in layers.items()
        }
        self._install(model, {name: _delta(layers[name], slots) for name, slots in chosen.items()})

    def _install(self, model: nn.Module, deltas: Mapping[str, BlockSparseLinear]) -> None:
        self.model = model
        self.layers: dict[str, AdaptedLinear] = {}
        model.requires_grad_(False)
        for layer in model.modules():
            if isinstance(layer, BlockSparseLinear) and layer.storage != "plain":
                layer._freeze()
        for name, delta in deltas.items():
            base: Any = model.get_submodule(name)
            self.layers[name] = AdaptedLinear(base, delta).train(base.training)
        _replace(model, {layer.base_layer: layer for layer in self.layers.values()})

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained: Δ of each layer."""
        return (layer.delta.weight for layer in self.layers.values())

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Adds Δ to the weights and removes the adapter.

        Sums are taken in the dtype of Δ and rounded once to that of the weight.

        Returns:
            The model, as it was before the adapter but for the weights; it stays frozen.

        Raises:
            UnsupportedError: the storage of a layer is not "plain", or its mask of 2:4 has changed and leaves
                out what the adapter has. The model is as it was.
            InvalidArgumentError: the pattern of a layer has changed and lacks blocks of the adapter. The
                model is as it was.
        """
        places = {}
        for name, layer in self.layers.items():
            if layer.base_layer.storage != "plain":
                raise UnsupportedError(
                    f"merge: the storage 'plain' expected of layer {name!r}, got "
                    f"{layer.base_layer.storage!r}; call to_storage('plain') on its base_layer first, and "
                    "to_storage after merging"
                )
            places[name] = _slots(name, layer.base_layer, layer.delta.pattern)
            mask = layer.base_layer._kept()
            if mask is not None and bool((layer.delta.plain_values()[~mask[places[name]]] != 0).any()):
                raise UnsupportedError(
                    f"merge: layer {name!r} does not keep all weights that its adapter has; its mask has "
                    "changed since"
                )
        for name, slots in places.items():
            base, delta = self.layers[name].base_layer, self.layers[name].delta
            base.weight[slots] = (base.weight[slots] + delta.plain_values()).to(base.weight.dtype)
        return self.remove()

    def remove(self) -> nn.Module:
        """Puts back the layers without Δ.

        Returns:
            The model; it stays frozen.
        """
        _replace(self.model, {layer: layer.base_layer for layer in self.layers.values()})
        self.layers = {}
        return self.model

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Writes the adapter alone to a safetensors file, which replaces one that is there once it is whole.

        Each layer has ``NAME.weight`` [n, bn, bk] and the pattern of its blocks, ``NAME.crow_indices``,
        ``NAME.col_indices`` and ``NAME.slot``, as `BlockPattern` has them; of 2:4 also the bools
        ``NAME.mask``. The metadata is ``tilesparse_adapter``, JSON with ``version`` 1 and ``layers``: by
        name, ``shape`` [out_features, in_features].

        Raises:
            InvalidArgumentError: the path is that of a folder.
            UnsupportedError: the storage of a Δ is not "plain", or the adapter was merged or removed.
            InvalidArgumentError: the file cannot be written.
        """
        if not self.layers:
            raise UnsupportedError("save: an adapter in its model expected, got one merged or removed")
        for name, layer in self.layers.items():
            if layer.delta.storage != "plain":
                raise UnsupportedError(
                    f"save: the storage 'plain' expected of the delta of layer {name!r}, got "
                    f"{layer.delta.storage!r}; call to_storage('plain') on it first"
                )
        tensors = {
            f"{name}.{key}": tensor
            for name, layer in self.layers.items()
            for key, tensor in layer.delta.state_dict().items()
        }
        shapes = {
            name: {"shape": [layer.delta.out_features, layer.delta.in_features]}
            for name, layer in self.layers.items()
        }
        about = {"version": _VERSION, "layers": shapes}
        if Path(path).is_dir():
            raise InvalidArgumentError(f"path must be the path of a file, got the folder {os.fspath(path)!r}")
        part = Path(f"{os.fspath(path)}.part")
        try:
            write_tensors(part, tensors, {"tilesparse_adapter": json.dumps(about)})
            part.replace(path)
        except OSError as error:
            raise InvalidArgumentError(f"path must be a file that can be written: {error}") from error

    @classmethod
    @checked
    def load(cls, model: nn.Module, path: str | PathLike[str]) -> BlockSparseAdapter:
        """Adapts a model as a file says that `save` wrote.

        Args:
            model: with the layers of the file, which keep all blocks of the adapter.
            path: of the file.

        Raises:
            CheckpointError: the file is missing or none of these, or does not fit the model, which is as it
                was.
        """
        about, tensors = _read(path)
        owned: dict[str, dict[str, Tensor]] = {name: {} for name in about}
        for key, tensor in tensors.items():
            name, _, own = key.rpartition(".")
            owned[name][own] = tensor
        modules, deltas = dict(model.named_modules()), {}
        owners = owners_of_parameters(modules.values())
        for name, entry in about.items():
            try:
                deltas[name] = _loaded(_target(modules, owners, name), name, entry, owned[name])
            except TileSparseError as error:
                raise CheckpointError(f"path: {os.fspath(path)}: layer {name!r}: {error}") from error
        adapter = cls.__new__(cls)
        adapter._install(model, deltas)
        return adapter


def _matching(model: nn.Module, regex: str) -> dict[str, BlockSparseLinear]:
    match = compiled_pattern(regex).match
    modules = dict(model.named_modules())
    adapted = tuple(f"{name}." for name, module in modules.items() if isinstance(module, AdaptedLinear))
    names = [
        name
        for name, module in modules.items()
        if match(name)
        and isinstance(module, BlockSparseLinear | AdaptedLinear)
        and not name.startswith(adapted)
    ]
    if not names:
        raise InvalidArgumentError(
            f"regex: names of block-sparse layers expected, got {regex!r}, which has none"
        )
    owners = owners_of_parameters(modules.values())
    return {name: _target(modules, owners, name) for name in names}


def _target(
    modules: Mapping[str, nn.Module], owners: Mapping[nn.Parameter, list[nn.Module]], name: str
) -> BlockSparseLinear:
    """The layer of this name, if one can be adapted."""
    layer = modules.get(name)
    if isinstance(layer, AdaptedLinear):
        raise InvalidArgumentError(f"model: layer {name!r} has an adapter; call its merge or remove first")
    if not isinstance(layer, BlockSparseLinear) or not name:
        kind = "nothing" if layer is None else type(layer).__name__
        raise InvalidArgumentError(f"model: a BlockSparseLinear inside it expected as {name!r}, got {kind}")
    sharing = [owner for owner in owners.get(layer.weight, ()) if owner is not layer]
    if sharing:
        other = next(other for other, module in modules.items() if module is sharing[0])
        raise InvalidArgumentError(
            f"model: a weight of its own expected of layer {name!r}, got one that {other!r} has, too"
        )
    return layer


def _chosen(
    name: str,
    layer: BlockSparseLinear,
    density: float,
    scores: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Slots of the blocks to train, ascending, on the host."""
    nnz = layer.pattern.nnz
    if nnz == 0:
        raise InvalidArgumentError(f"regex: layers that keep blocks expected, {name!r} has none")
    if scores is None:
        order = torch.randperm(nnz, generator=generator, device="cpu")
    elif not isinstance(scores, Tensor):
        raise InvalidArgumentError(f"scores: a tensor expected for {name!r}, got {type(scores).__name__}")
    elif scores.shape != (nnz,):
        raise InvalidArgumentError(f"scores: shape {(nnz,)} expected for {name!r}, got {tuple(scores.shape)}")
    elif bool(scores.isnan().any()):
        raise InvalidArgumentError(f"scores: NaN of {name!r} cannot be ranked")
    else:
        order = scores.detach().cpu().argsort(descending=True, stable=True)
    return order[: max(1, round(density * nnz))].sort().values


def _delta(base: BlockSparseLinear, slots: Tensor) -> BlockSparseLinear:
    """Zeros for these blocks of a layer, and the entries of 2:4 that it keeps."""
    blocks = torch.stack(base.pattern.to("cpu").block_indices(), dim=1)[slots]
    delta = BlockSparseLinear(
        base.in_features,
        base.out_features,
        bias=False,
        pattern=BlockPattern.from_blocks(
            blocks, shape=(base.out_features, base.in_features), block_shape=base.block_shape
        ),
        nm=base.nm,
        transposable=base.transposable,
        device=base.weight.device,
        dtype=torch.promote_types(base._dtype, torch.float32),
    )
    mask = base._kept()
    with torch.no_grad():
        delta.weight.zero_()
        if mask is not None and delta.mask is not None:
            delta.mask.copy_(mask[slots.to(mask.device)])
    return delta


def _slots(name: str, base: BlockSparseLinear, pattern: BlockPattern) -> Tensor:
    """Where the layer has the blocks of a pattern, by their slots there."""
    places = {block: slot for slot, block in enumerate(_blocks(base.pattern))}
    blocks = _blocks(pattern)
    missing = [block for block in blocks if block not in places]
    if missing:
        raise InvalidArgumentError(
            f"pattern: block {missing[0]} of the adapter is not kept by layer {name!r}"
        )
    return torch.tensor([places[block] for block in blocks], device=base.weight.device)


def _blocks(pattern: BlockPattern) -> list[tuple[int, int]]:
    """(row, column) of each block, by slot."""
    rows, cols = pattern.block_indices()
    return list(zip(rows.tolist(), cols.tolist(), strict=True))


def _loaded(base: BlockSparseLinear, name: str, entry: Any, state: Mapping[str, Tensor]) -> BlockSparseLinear:
    shape = [base.out_features, base.in_features]
    if not isinstance(entry, dict) or entry.get("shape") != shape:
        raise InvalidArgumentError(f"shape: {shape} expected, got {entry}")
    missing = [key for key in INDEX_NAMES if key not in state]
    if missing:
        raise InvalidArgumentError(f"{missing[0]}: missing")
    weight = state["weight"]
    if weight.dim() != 3 or tuple(weight.shape[1:]) != base.block_shape or not weight.is_floating_point():
        raise InvalidArgumentError(
            f"weight: floating-point blocks of {base.block_shape} expected, got {weight.dtype} of shape "
            f"{tuple(weight.shape)}"
        )
    pattern = BlockPattern(
        state["crow_indices"],
        state["col_indices"],
        shape=shape,
        block_shape=base.block_shape,
        slot=state["slot"],
    )
    if pattern.nnz != len(weight):
        raise InvalidArgumentError(f"weight: {pattern.nnz} blocks expected, got {len(weight)}")
    delta = _delta(base, _slots(name, base, pattern).cpu())
    if not _is_same(state.get("mask"), delta.mask):
        raise InvalidArgumentError("mask: the entries of 2:4 that the layer keeps expected, got others")
    with torch.no_grad():
        delta.weight.copy_(weight)
    return delta


def _is_same(mask: Tensor | None, own: Tensor | None) -> bool:
    if mask is None or own is None:
        return mask is own
    return mask.dtype == own.dtype and torch.equal(mask, own.cpu())


def _read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of its layers, and its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("tilesparse_adapter", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"path: {os.fspath(path)} is missing") from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"path: a safetensors file expected, got {os.fspath(path)}: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("layers"), dict) or not about["layers"]:
        raise CheckpointError(f"path: a file of BlockSparseAdapter.save expected, got {os.fspath(path)}")
    if about.get("version") != _VERSION:
        raise CheckpointError(
            f"path: version {_VERSION} of the file expected, got {about.get('version')!r}; a newer "
            "TileSparse may have written it"
        )
    stray = [key for key in tensors if key.rpartition(".")[0] not in about["layers"]]
    if stray:
        raise CheckpointError(f"path: tensors of its layers expected in {os.fspath(path)}, got {stray[0]!r}")
    return about["layers"], tensors


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Each module by another one, under all names that it has."""
    names = names_of_modules(model)
    for module, replacement in new.items():
        for name in names.get(module, ()):
            set_submodule(model, name, replacement)
