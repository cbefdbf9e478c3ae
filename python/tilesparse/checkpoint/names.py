"""Names of what a model saves, and of the folder it is saved in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from .._runtime.tensor_files import shown
from ..errors import InvalidArgumentError


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of its own, by their attributes."""
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, tensor


def joined(prefix: str, attribute: str) -> str:
    """Join the name of a module and an attribute's."""
    return f"{prefix}.{attribute}" if prefix else attribute


def checked_folder(path: object) -> Path:
    """What is given as the path of a checkpoint, which may be missing yet."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"path must be the path of a folder, got {shown(path)}")
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise InvalidArgumentError(
                f"path must be the path of a folder, got {str(folder)!r}, where {str(place)!r} is a file"
            )
    return folder
