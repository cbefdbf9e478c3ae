"""Block-sparse adapters: a few blocks of each layer are trained, beside a frozen model.

The adapter's update lies where its layer keeps weights, so merging fills no zeros and loses nothing; LoRA
loses much there (see `tilesparse.integrations.peft`). Training some weights and freezing the others is known as sparse
fine-tuning (Ansell et al., "Composable Sparse Fine-Tuning for Cross-Lingual Transfer", ACL 2022); here whole
blocks are chosen. PEFT is not needed. Files are safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked, shown
from .._checks import as_number
from ..errors import CheckpointError, InvalidArgumentError, TileSparseError, UnsupportedError
from ..nn.experts_linear import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..patch.modules import names_of_modules, owners_of_parameters, set_submodule
from ..storage.registry import storage_of
from .blocks import adaptable_layer, chosen_slots, matching_layers, slots_of, zero_delta
from .files import loaded_delta, read_adapter, write_adapter
from .linear import AdaptedExperts, AdaptedLinear


class BlockSparseAdapter:
    """Trains a fraction of the blocks of a model's block-sparse layers, in place.

    All parameters of the model are frozen, and each layer becomes an `AdaptedLinear` whose Δ begins with
    zeros. A step computes the gradients of the chosen blocks alone.

    Args:
        model: a model with `BlockSparseLinear` layers, in any storage.
        regex: a name or regular expression that the layers' qualified names match, as in
            `BlockSparseModelPatcher.add_pattern`.
        density: fraction of a layer's kept blocks that is trained, at least one of each layer.
        scores: rank of the blocks: by name of the layer, one number for each kept block [nnz] in the order of
            its weight, higher is better, such as ``layer.weight.grad.norm(dim=(1, 2))``. None draws blocks.
        generator: the CPU generator that draws blocks.

    Attributes:
        model: the adapted model.
        layers: the `AdaptedLinear` layers by name.

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
        if not 0 < as_number(density) <= 1:
            raise InvalidArgumentError(f"density must be in (0, 1], got {shown(density)}")
        layers = matching_layers(model, regex)
        if scores is not None and scores.keys() != layers.keys():
            odd = sorted(scores.keys() ^ layers.keys())
            raise InvalidArgumentError(
                f"scores must have one tensor for each layer that regex matches, see {odd}"
            )
        chosen = {
            name: chosen_slots(name, layer, density, None if scores is None else scores[name], generator)
            for name, layer in layers.items()
        }
        self._install(model, {name: zero_delta(layers[name], slots) for name, slots in chosen.items()})

    def _install(self, model: nn.Module, deltas: Mapping[str, BlockSparseLinear]) -> None:
        self.model = model
        self.layers: dict[str, AdaptedLinear] = {}
        model.requires_grad_(False)
        for layer in model.modules():
            if isinstance(layer, BlockSparseLinear) and not storage_of(layer.storage).trainable:
                layer.freeze()
        for name, delta in deltas.items():
            base: Any = model.get_submodule(name)
            adapted = AdaptedExperts if isinstance(base, ExpertsLinear) else AdaptedLinear
            self.layers[name] = adapted(base, delta).train(base.training)
        _replace(model, {layer.base_layer: layer for layer in self.layers.values()})

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters: Δ of each layer."""
        return (layer.delta.weight for layer in self.layers.values())

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Add Δ to the weights and remove the adapter.

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
            if not storage_of(layer.base_layer.storage).trainable:
                raise UnsupportedError(
                    f"merge needs the storage 'plain' of layer {name!r}, got "
                    f"{layer.base_layer.storage!r}; call to_storage('plain') on its base_layer first, and "
                    "to_storage after merging"
                )
            places[name] = slots_of(name, layer.base_layer, layer.delta.pattern)
            mask = layer.base_layer.kept_mask()
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
        """Put back the layers without Δ.

        Returns:
            The model; it stays frozen.
        """
        _replace(self.model, {layer: layer.base_layer for layer in self.layers.values()})
        self.layers = {}
        return self.model

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Write the adapter alone to a safetensors file, which replaces an existing one once it is complete.

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
            raise UnsupportedError("save needs an adapter in its model, got one merged or removed")
        for name, layer in self.layers.items():
            if not storage_of(layer.delta.storage).trainable:
                raise UnsupportedError(
                    f"save needs the storage 'plain' of the delta of layer {name!r}, got "
                    f"{layer.delta.storage!r}; call to_storage('plain') on it first"
                )
        write_adapter(path, {name: layer.delta for name, layer in self.layers.items()})

    @classmethod
    @checked
    def load(cls, model: nn.Module, path: str | PathLike[str]) -> BlockSparseAdapter:
        """Return the adapter of a file that `save` wrote, put into a model.

        Args:
            model: has the layers of the file, which keep all blocks of the adapter.
            path: the file.

        Raises:
            CheckpointError: the file is missing, is not an adapter's, or does not fit the model. The model is
                as it was.
        """
        about, tensors = read_adapter(path)
        owned: dict[str, dict[str, Tensor]] = {name: {} for name in about}
        for key, tensor in tensors.items():
            name, _, own = key.rpartition(".")
            owned[name][own] = tensor
        modules, deltas = dict(model.named_modules()), {}
        owners = owners_of_parameters(modules.values())
        for name, entry in about.items():
            try:
                deltas[name] = loaded_delta(adaptable_layer(modules, owners, name), name, entry, owned[name])
            except TileSparseError as error:
                raise CheckpointError(
                    f"path must fit the model, got {os.fspath(path)}: layer {name!r}: {error}"
                ) from error
        adapter = cls.__new__(cls)
        adapter._install(model, deltas)
        return adapter


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules of a model, under all names that they have."""
    names = names_of_modules(model)
    for module, replacement in new.items():
        for name in names.get(module, ()):
            set_submodule(model, name, replacement)
