"""Manifest of a checkpoint: the section of ``config.json`` on block-sparse layers.

docs/checkpoints.md has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .._runtime.tensor_files import checked_texts, few, named, read_json, shown
from ..config import METHOD, NEWER, LayerSpec
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from .files import CONFIG

VERSION = max(NEWER.values())  # the newest; a section has the least version that knows what is in it
_KEYS = {"version", "layers", "ties", "files"}


def section(model: nn.Module) -> dict[str, Any]:
    """Return what a configuration says of a model's block-sparse layers, ready for JSON.

    Returns:
        ``{"version": 1, "layers": {name: entry}}`` with `LayerSpec.to_json` of each `BlockSparseLinear` as
        entry. A layer that the model has under several names is listed under the first. With 8-bit
        activations the version is 2, with experts 3: earlier readers refuse them.
    """
    layers = {
        name: module.spec.to_json()
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear)
    }
    return {"version": max(map(_version_of, layers.values()), default=1), "layers": layers}


def forms(folder: Path) -> Mapping[str, LayerSpec]:
    """Return the spec of each layer of a checkpoint, by name.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    return read_section(folder)[0]


def check_section(section: object) -> None:
    """Check what a configuration says of block-sparse layers; keys besides version and layers may be there.

    Raises:
        InvalidArgumentError: it is of a newer version, or not what `section` makes.
    """
    parsed_layers(section)


def parsed_layers(section: object) -> dict[str, LayerSpec]:
    """Return the spec of each layer that a section describes."""
    if not isinstance(section, Mapping):
        raise InvalidArgumentError(f"tilesparse must be a section, got {shown(section)}")
    version, layers = section.get("version"), section.get("layers")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidArgumentError(f"version must be a number of at least 1, got {shown(version)}")
    if version > VERSION:
        raise InvalidArgumentError(
            f"version must be at most {VERSION} here, got {shown(version)}; install a newer tilesparse"
        )
    if not isinstance(layers, Mapping) or not all(isinstance(name, str) for name in layers):
        raise InvalidArgumentError(f"layers must have an entry for each layer's name, got {shown(layers)}")
    for name, entry in layers.items():
        if version < _version_of(entry):
            newest = max((field for field in NEWER if field in entry), key=NEWER.__getitem__)
            raise InvalidArgumentError(
                f"version must be {NEWER[newest]}, as layer {shown(name)} has {newest}, got {shown(version)}"
            )
    return {name: _spec(name, entry) for name, entry in layers.items()}


def _version_of(entry: object) -> int:
    """Return the first version that has all fields of an entry."""
    fields = entry if isinstance(entry, Mapping) else {}
    return max((version for field, version in NEWER.items() if field in fields), default=1)


def _spec(name: str, entry: object) -> LayerSpec:
    try:
        return LayerSpec.from_json(entry)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"layers: {shown(name)}: {error}") from None


def read_section(folder: Path) -> tuple[dict[str, LayerSpec], dict[str, str], dict[str, str] | None]:
    """Return what the configuration says: specs of layers, other names of tensors, checksums of files."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"path must be a folder, there is none at {str(folder)!r}")
    config = read_json(folder / CONFIG)[0]
    quantization = config.get("quantization_config")
    is_quantization = is_method(quantization)
    if not is_quantization and METHOD not in config:
        raise CheckpointError(
            f"{CONFIG} must have a section {METHOD!r} or a quantization_config of that method, got neither"
        )
    # Where both are there Transformers has carried the other along, from an earlier checkpoint.
    own: Any = quantization if is_quantization else config[METHOD]
    with named(CONFIG):
        forms = parsed_layers(own)
        if not is_quantization and (others := sorted(set(own) - _KEYS)):
            raise InvalidArgumentError(f"{METHOD} must have keys from {sorted(_KEYS)}, got {few(others)}")
        ties = checked_texts("ties", own.get("ties", {}))
        files = own.get("files")
        return forms, ties, None if files is None else checked_texts("files", files)


def is_method(quantization: object) -> bool:
    """Return True for a quantization_config of this package."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
