"""Layers with random blocks, versions, and JSON files, which all measurements of layers share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import _C
from .._checks import as_integer, as_number
from .._files import replacing
from ..config import BlockSparseConfig
from ..errors import CheckpointNotFoundError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from .targets import checked_config

Result = TypeVar("Result")


def random_layer(
    shape: tuple[int, int], config: BlockSparseConfig, device: torch.device, dtype: torch.dtype
) -> BlockSparseLinear:
    """Return a layer without a bias, with random values and the same random blocks in every run."""
    return (
        BlockSparseLinear(
            shape[1],
            shape[0],
            bias=False,
            density=config.density,
            block_shape=config.block_shape,
            nm=config.nm,
            policy=config.policy,
            device=device,
            dtype=dtype,
            generator=torch.Generator().manual_seed(0),
        )
        .to_storage(config.storage, per=config.scales, activations=config.activations)
        .eval()
    )


def versions_of(device: torch.device) -> dict[str, str]:
    """Return the versions that times depend on, and the number of threads of a CPU."""
    found = {"tilesparse": _C.version(), "torch": torch.__version__}
    return found | ({"threads": str(torch.get_num_threads())} if device.type == "cpu" else {})


def config_of_json(entry: Mapping[str, Any] | None) -> BlockSparseConfig | None:
    """Return the config that `dataclasses.asdict` made an entry of; None for a dense layer."""
    if entry is None:
        return None
    bn, bk = map(as_integer, entry["block_shape"])
    nm = None if entry["nm"] is None else (as_integer(entry["nm"][0]), as_integer(entry["nm"][1]))
    others = {name: entry[name] for name in ("scales", "policy", "activations") if name in entry}
    config = BlockSparseConfig(entry["density"], (bn, bk), nm, entry["storage"], **others)
    return checked_config("config", config)


def time_of_json(number: object) -> float:
    """Return milliseconds that were read from a file."""
    milliseconds = as_number(number)
    if not 0 <= milliseconds < math.inf:
        raise ValueError(f"ms must be milliseconds, got {number!r}")
    return milliseconds


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write measurements as JSON; raises InvalidArgumentError if the file cannot be written."""
    try:
        with replacing(path) as file:
            file.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise InvalidArgumentError(f"path must be a file that can be written: {error}") from error


def read_document(path: str | Path, version: int, name: str, parse: Callable[[Any], Result]) -> Result:
    """Return what ``parse`` makes of a file that `write_document` wrote, whose version has to be this.

    Raises:
        CheckpointNotFoundError: the file cannot be read.
        InvalidArgumentError: it is not what ``name`` says, or a newer one.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise CheckpointNotFoundError(f"path must be a file that can be read: {error}") from error
    try:
        document = json.loads(text)
        if document["version"] != version:
            raise ValueError(f"version must be {version}, got {document['version']!r}")
        return parse(document)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"path: {path} is no {name}: {error!r}") from error
