"""Where the blocks of a model are at one moment."""

from __future__ import annotations

from torch import Tensor, nn

from .._arguments import checked
from ._layers import sparse_layers


@checked
def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return where the blocks of every `BlockSparseLinear` are now, by the names of layers.

    Returns:
        Bool masks [R, C], True for kept blocks, which do not follow the pattern; on the devices of the
        layers, and the host does not wait.

    Raises:
        InvalidArgumentError: ``model`` is no module.
    """
    return {name: layer.pattern.to_block_mask() for name, layer in sparse_layers(model).items()}
